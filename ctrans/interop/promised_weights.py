"""Whether the files of a directory hold the weights that its config.json describes, by names and
shapes alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from ctrans.dynamics.weights.on_demand import skeletons
from ctrans.interop.hugging_face import check_unused, checked_directory, ignored
from ctrans.interop.hugging_face_files import CONFIG, INDEX, WEIGHTS, read_config
from ctrans.interop.missing_weights import in_words
from ctrans.interop.model_class import class_names, known_class
from ctrans.interop.streamed import check_tied, stored_as
from ctrans.interop.transformers_library import import_transformers, reading
from solvers import ConfigError


def without_config(path: Path) -> bool:
    """Whether the path is a directory with weights as `save_pretrained` writes them, and without
    their config.json.
    """
    has_weights = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    return has_weights and not os.path.lexists(path / CONFIG)


def family_directory(path: Path) -> Path | None:
    """The directory of these weights if it has a config.json with a `model_type`, as
    `save_pretrained` writes it. Raises ConfigError for `architectures` that are no list of names,
    or a class of another family.
    """
    directory = path.parent if path.name == WEIGHTS else path
    if not (directory / CONFIG).is_file():
        return None
    try:
        settings = read_config(directory)
    except ConfigError:
        return directory  # whoever reads it says what is wrong
    if "model_type" not in settings:
        return None
    where = repr(str(directory / CONFIG))
    class_names(where, settings)
    try:
        transformers = import_transformers()
    except ConfigError:
        return directory  # the weights are measured without the library
    family = settings["model_type"]
    if isinstance(family, str) and family in transformers.CONFIG_MAPPING:
        known_class(where, settings, transformers)
    return directory


def why_unlike_config(directory: Path, *, allow_pickle: bool = False) -> str:
    """Why the stored weights are not those that the config describes: some are missing, of another
    shape, of no part of the model, or untied; "" if they are. No numbers are read but of weights
    that should be equal.

    Raises ConfigError where the two cannot be compared: no config, or one of a family that is not
    built in; weights whose names or shapes the library changes when it loads them.
    """
    _, _, stored, make = checked_directory(
        directory, None, allow_pickle=allow_pickle, on_demand=True
    )
    with reading(f"cannot load {str(directory)!r}"), skeletons():
        model: Any = make()
    base = f"{getattr(model, 'base_model_prefix', '')}."
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    missing = []
    misfits = []
    used = set()
    for parameter, names in names_of.items():
        found = [weight for name in names if (weight := stored_as(name, base, stored)) is not None]
        used |= {weight.name for weight in found}
        if not found and not tied.issuperset(names):
            missing.append(names[0])
        misfits += [
            f"{weight.name} is {weight.shape}, expected {tuple(parameter.shape)}"
            for weight in found
            if weight.shape != tuple(parameter.shape)
        ]
    used |= {
        weight.name
        for name, _ in model.named_buffers()
        if (weight := stored_as(name, base, stored)) is not None
    }
    unused = {name for name in stored if name not in used and not ignored(model, name)}
    if missing and unused and _are_renamed(model):
        raise ConfigError("the library changes the names of weights when it loads this family")
    if missing:
        expected = {names[0] for names in names_of.values()}
        return f"the file {in_words(missing, stored, expected)}"
    if misfits:
        return f"{misfits[0]}, by its {CONFIG}"
    try:
        check_unused(directory, model, unused)
        check_tied(model, stored)
    except ConfigError as error:
        return str(error)
    return ""


def _are_renamed(model: Any) -> bool:
    """Whether the library renames or merges weights of this family when it loads them."""
    import_transformers()
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))
