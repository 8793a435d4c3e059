"""The values of `ctrans screen --compare`: settings with several values, and architectures by
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctrans.base.option import defaults_of, field_types, options_of
from ctrans.cli.click_options import expand, expand_placements
from ctrans.model.architectures import GROUPS, differences
from ctrans.model.config import GPTConfig
from solvers import ConfigError, look_up

SWITCH = {"no": False, "yes": True}
SETTINGS = {
    about.flag(name).removeprefix("--"): name for name, about in options_of(GPTConfig).items()
}
"""The settings that can be compared: fields of `GPTConfig` by the names of their options."""


def values_of(setting: str, text: str) -> dict[Any, Any]:
    """The values of a text such as "1,none": from their names in results to the values of the field
    of `GPTConfig`.

    Raises ConfigError for an unknown setting or value.
    """
    name = look_up("setting to compare", setting, SETTINGS)
    parts = text.split(",")
    field_type = field_types(GPTConfig)[name]
    choices = options_of(GPTConfig)[name].choices
    default = defaults_of(GPTConfig)[name]
    if name == "placement":
        return {placement: placement for placement in expand_placements(parts)}
    if field_type.kind is bool:
        return {part: SWITCH[part] for part in expand(parts, SWITCH, name)}
    if choices is not None:
        if default in choices:
            return {part: part for part in expand(parts, choices, name)}
        table = {"none": default, **choices}
        return {part: default if part == "none" else part for part in expand(parts, table, name)}
    values: list[Any] = []
    try:
        for part in parts:
            if field_type.optional and part == "none":
                values.append(None)
            else:
                values.append(field_type.kind(part))
    except ValueError:
        raise ConfigError(
            f"--compare {setting}={text}: give numbers separated by commas, such as {setting}=1,2"
        ) from None
    return {"none" if value is None else value: value for value in values}


def axes_of(compare: Sequence[str]) -> dict[str, dict[Any, Any]]:
    """The values of each compared setting. Raises ConfigError for a setting that is given twice."""
    axes: dict[str, dict[Any, Any]] = {}
    for text in filter(_is_axis, compare):
        name, _, values = text.partition("=")
        if name in axes:
            raise ConfigError(
                f"--compare {name} is given twice: give all its values in one option, separated by"
                " commas"
            )
        axes[name] = values_of(name, values)
    return axes


def architectures_of(compare: Sequence[str], blocks: int) -> dict[str, dict[str, Any]]:
    """The changes of plain pre-LN in each named architecture: fields of `GPTConfig`."""
    texts = [part for text in compare if not _is_axis(text) for part in text.split(",")]
    names = dict.fromkeys(name for text in texts for name in GROUPS.get(text, [text]))
    return {name: _fields(name, blocks) for name in names}


def _fields(text: str, blocks: int) -> dict[str, Any]:
    """The fields of `GPTConfig` that a text such as "llama:dt=0.1" sets."""
    fields: dict[str, Any] = {}
    for part in text.split(":"):
        name, equals, value = part.partition("=")
        if not equals:
            fields |= differences(name, blocks)
            continue
        values = values_of(name, value)
        if len(values) > 1:
            raise ConfigError(f"--compare {text}: {name} has {len(values)} values: give one")
        (fields[SETTINGS[name]],) = values.values()
    return fields


def _is_axis(text: str) -> bool:
    """Whether the text is a setting with values; otherwise it names architectures."""
    return "=" in text and ":" not in text and "," not in text.partition("=")[0]
