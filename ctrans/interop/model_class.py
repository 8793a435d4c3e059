"""The library's class that the `architectures` of a config.json name."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from typing import Any

from solvers import ConfigError, shown


def class_names(where: str, settings: Mapping[str, Any]) -> list[str]:
    """The names of the model's class in a config's `architectures`, the first that is known counts.
    Raises ConfigError for an entry that is no list of names.
    """
    names = settings.get("architectures")
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{where} says architectures = {shown(names)}: it must be a list of texts, the names of"
            " the model's classes, or null"
        )
    return names


def model_class(where: str, settings: Mapping[str, Any], transformers: Any) -> Any:
    """The library's class that a config names, or None. Raises ConfigError if no name is a class of
    the library: its default would have no head.
    """
    names = class_names(where, settings)
    if not names:
        return None
    family = _family(settings, transformers)
    for name in names:
        kind = getattr(transformers, name, None) or family.get(name)
        if _is_model_class(kind, transformers):
            return kind
    models = {
        full.lower(): full for full, kind in family.items() if _is_model_class(kind, transformers)
    }
    close = difflib.get_close_matches(names[0].lower(), models, n=1)
    hint = "give the name of a class, or leave the entry out to read the model without a head"
    if close:
        hint = f"did you mean {models[close[0]]!r}?"
    raise ConfigError(
        f"{where} says architectures = {shown(names)}, which is no class of the library: {hint}"
    )


def _family(settings: Mapping[str, Any], transformers: Any) -> Mapping[str, Any]:
    """By name, what the module of a config's family has: also parts of its models, such as an
    encoder.
    """
    config_class = transformers.CONFIG_MAPPING[settings["model_type"]]
    default = transformers.MODEL_MAPPING.get(config_class, None)
    if default is None:
        return {}
    return vars(sys.modules[default.__module__])


def _is_model_class(kind: Any, transformers: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
