"""Models on disk: a directory with the configuration as `config.json` and the weights as
`model.safetensors`. ctrans never uses pickle.

Weights that several blocks share (`GPTConfig.depth_weights`) are stored once, under the first of
their names. The file's metadata hold a digest of the configuration, because the same weights with
another dt are another model.

A model with low-rank updates (`ctrans.dynamics.weights.low_rank`) has its A and B in
`adapter.safetensors`. The weights that they update are in the directory `base` next to its own,
once for any number of such models. The adapter's metadata hold the SHA-256 of the base's weights,
because the same updates of other weights are another model.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from ctrans.base.durable_files import flush, write_durably
from ctrans.base.given_files import check_file, read_json
from ctrans.dynamics.weights.low_rank import before_updates, factors, merge_updates, update_like
from ctrans.dynamics.weights.on_demand import check_present
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.size import check_buildable, number_of_weights
from ctrans.model.sums import are_of_two_runs, check_bound
from ctrans.model.weights_file import read_weights, sha256_of, write_weights
from solvers import ConfigError, unknown

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
ADAPTER = "adapter.safetensors"
BASE = "base"
_NAMES = [field.name for field in fields(GPTConfig)]
_FIRST = _NAMES[_NAMES.index("vocab_size") : _NAMES.index("knots") + 1]
LATER = frozenset(_NAMES) - frozenset(_FIRST)
"""Options that are newer than the first checkpoints, which have the options from `vocab_size` to
`knots`.
"""
BEST = "best"
LAST = "last"
"""Links to checkpoints in the directory of a training run."""
CONFIG_DIGEST = "config_sha256"
BASE_DIGEST = "base_sha256"
"""Keys in the metadata of a file of weights. A file without a key is not checked."""


def save(model: GPT, directory: str | Path) -> None:
    """Writes the model to the directory, each file whole or not at all, even if the machine stops.
    For a model with low-rank updates it writes the updates, and their base next to the directory if
    there is none. It removes an earlier model of the other kind from the directory. Raises
    ConfigError if it cannot write, if there is another base, or if updates that `load` would read
    are of others.
    """
    check_present(model, "saved")
    directory = Path(directory)
    updates = factors(model)
    adapter = directory / ADAPTER
    if not updates and os.path.lexists(adapter) and not of_ours(adapter):
        raise ConfigError(
            f"{str(adapter)!r} was not saved by ctrans, and `load` would read it in place of the"
            " model: move it away, or choose another directory"
        )
    base = directory.parent / BASE
    if updates and os.path.realpath(base) == os.path.realpath(directory):
        raise ConfigError(
            f"{str(directory)!r} is the place of the weights that are updated: choose another name"
        )
    try:
        if updates:
            digest = _save_base(model, base)
            _write(directory, ADAPTER, model.config, updates, {BASE_DIGEST: digest})
            _remove_ours(directory / WEIGHTS)
        else:
            _write(directory, WEIGHTS, model.config, _weights(model))
            _remove_ours(adapter)
    except OSError as error:
        raise ConfigError(
            f"cannot write a checkpoint to {str(directory)!r}: {error.strerror or error}"
        ) from None


def _write(
    directory: Path,
    name: str,
    config: GPTConfig,
    weights: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    settings = _settings(config)
    metadata = {CONFIG_DIGEST: digest(settings), **(metadata or {})}
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory / name, weights, metadata)
    write_durably(directory / CONFIG, json.dumps(settings, indent=1).encode())


def _remove_ours(weights: Path) -> None:
    """Removes a file of weights or of updates that `save` wrote. One of others stays."""
    if of_ours(weights):
        weights.unlink()
        flush(weights.parent)


def _save_base(model: GPT, directory: Path) -> str:
    """Writes the weights that the model updates unless they exist, and returns their SHA-256.
    Raises ConfigError for other weights there.
    """
    weights = before_updates(model)
    digest = sha256_of(weights)
    path = directory / WEIGHTS
    complete = os.path.exists(directory / CONFIG)
    if not complete and not os.path.lexists(path):
        _write(directory, WEIGHTS, model.config, weights)
        return digest
    saved_weights, _ = read_weights(path)
    if sha256_of(saved_weights) != digest:
        raise ConfigError(
            f"{str(directory)!r} has other weights than those that this model updates: save it in"
            " another directory"
        )
    if not complete:  # a kill came between the weights and the configuration
        _write(directory, WEIGHTS, model.config, weights)
    return digest


def remove_base(directory: Path) -> None:
    """Removes a base that `save` wrote, or began to write. Files of others stay."""
    with contextlib.suppress(OSError):
        if of_ours(directory / WEIGHTS):
            for name in (CONFIG, WEIGHTS):  # the weights last: they identify the directory as ours
                (directory / name).unlink(missing_ok=True)
        for name in (CONFIG, WEIGHTS):
            for unfinished in directory.glob(f".{name}.[0-9]*"):
                if unfinished.suffix.removeprefix(".").isdecimal():
                    unfinished.unlink()
        directory.rmdir()


def of_ours(weights: Path) -> bool:
    """Whether `save` wrote this file of weights or of updates."""
    try:
        check_file(weights)
        with safetensors.safe_open(weights, "pt") as file:
            return CONFIG_DIGEST in (file.metadata() or {})
    except (OSError, ConfigError, safetensors.SafetensorError):
        return False


def _weights(model: GPT) -> dict[str, Tensor]:
    """Each weight once, under the first of its names."""
    first = _first_names(model)
    return {
        name: weight for name, weight in model.state_dict().items() if first.get(name, name) == name
    }


def _settings(config: GPTConfig) -> dict[str, Any]:
    """All options; the newer ones only if they are not at their defaults. So older versions can
    read a model that does not use them.
    """
    idle = {field.name: field.default for field in fields(config) if field.name in LATER}
    return {
        name: value
        for name, value in asdict(config).items()
        if name not in idle or value != idle[name]
    }


def find_model(directory: str | Path) -> Path:
    """The directory that holds the model: the given one, or `best` of a training run.

    Raises ConfigError for no such directory, a directory without a model, and a run whose `best` is
    missing, broken, or a checkpoint of another run.
    """
    directory = Path(directory)
    best = directory / BEST
    last = directory / LAST
    if os.path.exists(directory / CONFIG):  # Path.exists may raise
        return directory.resolve()
    fix = "give one that ctrans saved (config.json, model.safetensors), or a training run's"
    if not os.path.exists(directory):
        raise ConfigError(f"there is no checkpoint {str(directory)!r} that can be read: {fix}")
    if not (os.path.lexists(best) or os.path.lexists(last)):
        if os.path.isdir(directory):
            raise ConfigError(f"{str(directory)!r} holds no model of ctrans: {fix}")
        return directory
    if not os.path.exists(best / CONFIG):
        if os.path.lexists(best):
            fault = "leads nowhere"
        else:
            fault = "is missing"
        raise ConfigError(
            f"{str(best)!r}, the best model of the run, {fault}: give another checkpoint, such as"
            f" {str(last)!r}, or continue the run with ctrans train --resume"
        )
    checkpoint = best.resolve()  # a running training moves its links
    are_links = os.path.islink(last) and os.path.islink(best)
    if are_links and last.resolve().parent != checkpoint.parent:
        raise ConfigError(
            f"{str(best)!r} is of a run that was overwritten: give {str(last)!r}, or continue the"
            " run with ctrans train --resume"
        )
    if os.path.exists(last) and are_of_two_runs(checkpoint, last.resolve()):
        raise ConfigError(
            f"{str(best)!r} is a checkpoint of another run than {str(last)!r}: restore the one that"
            f" belongs here, or give {str(last)!r}"
        )
    return checkpoint


def load_config(directory: str | Path) -> GPTConfig:
    """The configuration in this directory (see `find_model`). Raises ConfigError for a missing or
    damaged file and for unknown keys.
    """
    return GPTConfig(**_read_settings(find_model(directory) / CONFIG))


def _read_settings(path: Path) -> dict[str, Any]:
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ConfigError(f"{str(path)!r} holds no object: it is not a checkpoint of ctrans")
    for key in settings:
        if key not in _NAMES:
            raise unknown("key in config.json", key, _NAMES)
    return settings


def load(directory: str | Path, *, merge: bool = True) -> GPT:
    """The model in this directory (see `find_model`), on the CPU, in the dtype of the saved
    weights; the smallest that holds them all if they have several.

    Low-rank updates are merged into the weights, or kept as updates without `merge`. Raises
    ConfigError for missing or damaged files, pickles, files of another run, weights that do not fit
    the configuration, a configuration that was changed after saving, and updates without their
    base.
    """
    directory = find_model(directory)
    check_bound(directory)
    has_updates = os.path.exists(directory / ADAPTER)
    if has_updates:
        path = directory / ADAPTER
    else:
        path = directory / WEIGHTS
    settings = _read_settings(directory / CONFIG)
    config = GPTConfig(**settings)
    check_buildable(config, seed=0)
    weights, metadata = read_weights(path)
    if metadata.get(CONFIG_DIGEST) not in (None, digest(settings)):
        raise ConfigError(
            f"{str(directory / CONFIG)!r} was changed after {str(path)!r} was saved: restore the"
            " original"
        )
    if not has_updates:
        described = number_of_weights(config)
        if described > sum(weight.numel() for weight in weights.values()):
            raise ConfigError(
                f"{str(path)!r} does not fit its config.json, which describes {described:,} weights"
            )
        return _filled(GPT(config), weights, path)
    base = _base_of(path, config, metadata.get(BASE_DIGEST))
    model = update_like(base, weights, path)
    if merge:
        return merge_updates(model)
    return model


def _base_of(adapter: Path, config: GPTConfig, digest: str | None) -> GPT:
    """The model that the updates in this file belong to. Raises ConfigError if it is missing or
    another model.
    """
    directory = adapter.parent.parent / BASE
    if not os.path.exists(directory / CONFIG):
        raise ConfigError(
            f"{str(adapter)!r} updates weights that are not in {str(directory)!r}: copy the"
            f" directory `{BASE}` of its run there"
        )
    if os.path.exists(directory / ADAPTER):  # which could be this one again
        raise ConfigError(
            f"{str(directory)!r} has {ADAPTER} itself: restore the base of the run of"
            f" {str(adapter)!r}"
        )
    base = load(directory)
    if base.config != config or sha256_of(_weights(base)) != digest:
        raise ConfigError(
            f"{str(adapter)!r} updates other weights than those in {str(directory)!r}: restore the"
            " base of its run"
        )
    return base


def _filled(model: GPT, weights: Mapping[str, Tensor], path: Path) -> GPT:
    """The model with these weights from `path`. Raises ConfigError if they do not fit it."""
    first = _first_names(model)
    expected_shapes = {name: tuple(weight.shape) for name, weight in _weights(model).items()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in sorted(expected_shapes.keys() | shapes.keys()):
        shape = shapes.get(name, "absent")
        expected = expected_shapes.get(name, "absent")
        if shape != expected:
            raise ConfigError(
                f"{str(path)!r} does not fit its config.json: {name} is {shape}, expected"
                f" {expected}"
            )
    dtype = functools.reduce(torch.promote_types, (weight.dtype for weight in weights.values()))
    tensors = {}
    for name, weight in weights.items():
        tensors[name] = weight.to(dtype)
        if name in first:  # all others are buffers, which nothing trains
            tensors[name] = nn.Parameter(tensors[name])
    # one Parameter under all its names stays shared
    state = {name: tensors[first.get(name, name)] for name in model.state_dict()}
    model.load_state_dict(state, assign=True)
    return model


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter, by all its names."""
    by_identity: dict[int, str] = {}
    return {
        name: by_identity.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 of the settings' values, independent of a file's layout."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
