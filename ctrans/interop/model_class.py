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
    the library, whose default would have no head, and as `known_class`.
    """
    names = class_names(where, settings)
    kind = known_class(where, settings, transformers)
    if kind is not None or not names:
        return kind
    family = _family(settings, transformers)
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


def known_class(where: str, settings: Mapping[str, Any], transformers: Any) -> Any:
    """The first class of the library that a config names; None if it names none.

    Raises ConfigError if it is of another family than the config's `model_type`: the library's
    automatic classes would make a model of that family instead, with other numbers.
    """
    names = class_names(where, settings)
    family = _family(settings, transformers)
    for name in names:
        kind: Any = getattr(transformers, name, None) or family.get(name)
        if not _is_model_class(kind, transformers):
            continue
        if not _is_of_family(kind, settings, transformers):
            raise ConfigError(
                f"{where} says model_type = {shown(settings['model_type'])} and architectures ="
                f" {shown(names)}, and {name} is a class of {kind.config_class.model_type!r}: make"
                " the two agree, as the model was trained"
            )
        return kind
    return None


def _family(settings: Mapping[str, Any], transformers: Any) -> Mapping[str, Any]:
    """By name, what the module of a config's family has: also parts of its models, such as an
    encoder.
    """
    config_class = transformers.CONFIG_MAPPING[settings["model_type"]]
    default = transformers.MODEL_MAPPING.get(config_class, None)
    if default is None:
        return {}
    if isinstance(default, tuple):  # Funnel has a model with a decoder, and one without
        default = default[0]
    return vars(sys.modules[default.__module__])


def _is_of_family(kind: Any, settings: Mapping[str, Any], transformers: Any) -> bool:
    """Whether the class is for a config of this family, or for a part of one: it is in the family's
    module, its config is the same or derived, or the library itself pairs the two.
    """
    config_class = transformers.CONFIG_MAPPING[settings["model_type"]]
    of_kind: Any = getattr(kind, "config_class", None)
    if not isinstance(of_kind, type):  # some classes have none, or one of several
        return True
    if kind.__name__ in _family(settings, transformers):
        return True
    parts = (getattr(config_class, "sub_configs", None) or {}).values()
    is_derived = issubclass(config_class, of_kind)
    has_its_type = getattr(of_kind, "model_type", None) == settings["model_type"]
    if is_derived or has_its_type or of_kind in parts:
        return True
    return kind.__name__ in _paired(settings["model_type"], transformers)


def _paired(family: str, transformers: Any) -> set[str]:
    """The names of the classes that the library's tables give for a family, for any task."""
    names: set[str] = set()
    for table in vars(transformers.models.auto.modeling_auto).values():
        if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
            continue
        of_table = table.get(family, ())
        if isinstance(of_table, str):
            names.add(of_table)
        else:
            names.update(of_table)
    return names


def _is_model_class(kind: Any, transformers: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
