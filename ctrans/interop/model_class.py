"""The library's class that the `architectures` of a config.json name."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from typing import Any

from solvers import ConfigError, shown


def class_name(where: str, settings: Mapping[str, Any]) -> str | None:
    """The name of the model's class in a config's `architectures`, or None. Raises ConfigError for
    an entry that is no list of names.
    """
    names = settings.get("architectures")
    if names is None or names == []:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{where} says architectures = {shown(names)}: it must be a list of texts, the names of"
            " the model's classes, or null"
        )
    name: str = names[0]
    return name


def model_class(where: str, settings: Mapping[str, Any], transformers: Any) -> Any:
    """The library's class that a config names, or None. Raises ConfigError for a name that is no
    class of the library: its default would have no head.
    """
    name = class_name(where, settings)
    if name is None:
        return None
    kind = getattr(transformers, name, None)
    if kind is None:  # one of the parts of a family, such as an encoder
        config_class = transformers.CONFIG_MAPPING[settings["model_type"]]
        default = transformers.MODEL_MAPPING.get(config_class, None)
        kind = getattr(sys.modules.get(getattr(default, "__module__", "")), name, None)
    if _is_model_class(kind, transformers):
        return kind
    full_names = {full.lower(): full for full in dir(transformers)}
    close = difflib.get_close_matches(name.lower(), full_names, n=8)
    nearest = [full_names[lower] for lower in close]
    models = [
        full for full in nearest if _is_model_class(getattr(transformers, full), transformers)
    ]
    hint = "give the name of a class, or leave the entry out to read the model without a head"
    if models:
        hint = f"did you mean {models[0]!r}?"
    raise ConfigError(
        f"{where} says architectures = {shown([name])}, which is no class of the library: {hint}"
    )


def _is_model_class(kind: Any, transformers: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
