"""A model on disk: a directory with the configuration as `config.json` and the weights as
`model.safetensors`. No pickle.

Weights that several blocks share (`GPTConfig.depth_weights`) are stored once, under the first of
their names. A digest of the configuration stands in the file's metadata, because the same weights
with another dt would otherwise be another model.

A model with low-rank updates (`ctrans.weights.low_rank`) has its A and B in `adapter.safetensors`
instead, and the weights that they update in the directory `base` beside its own, once for any
number of such models. The SHA-256 of the base's weights stands in the adapter's metadata, because
the same updates of others would otherwise be another model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor, nn

from ctrans.given_files import read_json
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, check_buildable
from ctrans.model.sums import check_bound
from ctrans.model.weights_file import read_weights, sha256_of, write_durably, write_weights
from ctrans.weights.low_rank import before_updates, factors, merge_updates, update_like
from ctrans.weights.on_demand import check_present
from solvers import ConfigError
from solvers.errors import unknown

CONFIG, WEIGHTS, ADAPTER, BASE = "config.json", "model.safetensors", "adapter.safetensors", "base"
_NAMES = [field.name for field in dataclasses.fields(GPTConfig)]
LATER = frozenset(_NAMES) - {*_NAMES[_NAMES.index("vocab_size") : _NAMES.index("knots") + 1]}
"""Options that came after the first checkpoints. The first ones are those from `vocab_size` to
`knots`.
"""
BEST, LAST = "best", "last"
"""Where the directory of a training run has its models: links to checkpoints."""
CONFIG_DIGEST, BASE_DIGEST = "config_sha256", "base_sha256"
"""What the metadata of the weights' file call them; a file without them is not checked by them."""


def save(model: GPT, directory: str | Path) -> None:
    """Writes the model there, each file whole or not at all, also if the machine stops; one with
    low-rank updates as these, with its base beside the directory, where that is written if there is
    none. Raises ConfigError where it cannot be written, or another base is there.
    """
    check_present(model, "saved")
    directory = Path(directory)
    updates = factors(model)
    try:
        if updates:
            digest = _save_base(model, directory.parent / BASE)
            _write(directory, ADAPTER, model.config, updates, {BASE_DIGEST: digest})
        else:
            _write(directory, WEIGHTS, model.config, _weights(model))
    except OSError as error:
        raise ConfigError(f"cannot write a checkpoint to {str(directory)!r}: {error.strerror or error}") from None


def _write(
    directory: Path, name: str, config: GPTConfig, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    settings = _settings(config)
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory / name, weights, {CONFIG_DIGEST: _digest(settings), **(metadata or {})})
    write_durably(directory / CONFIG, json.dumps(settings, indent=1).encode())


def _save_base(model: GPT, directory: Path) -> str:
    """The SHA-256 of the weights that the model updates, which are there from now on."""
    weights = before_updates(model)
    digest = sha256_of(weights)
    if not os.path.exists(directory / CONFIG) and (_of_ours(directory / WEIGHTS) or not os.path.lexists(directory / WEIGHTS)):
        _write(directory, WEIGHTS, model.config, weights)
    elif sha256_of(read_weights(directory / WEIGHTS)[0]) != digest:
        raise ConfigError(f"{str(directory)!r} has other weights than those that this model updates: save it somewhere else")
    return digest


def remove_base(directory: Path) -> None:
    """Removes what `save` wrote there as a base, or has begun to; what anybody else has there
    stays.
    """
    with contextlib.suppress(OSError):
        if _of_ours(directory / WEIGHTS):
            for name in (CONFIG, WEIGHTS):  # the weights last: they tell whose it is
                (directory / name).unlink(missing_ok=True)
        for name in (CONFIG, WEIGHTS):
            for unfinished in directory.glob(f".{name}.[0-9]*"):
                unfinished.unlink()
        directory.rmdir()


def _of_ours(weights: Path) -> bool:
    """Whether a file of weights was written by `save`."""
    try:
        with safetensors.safe_open(weights, "pt") as file:
            return CONFIG_DIGEST in (file.metadata() or {})
    except (OSError, safetensors.SafetensorError):
        return False


def _weights(model: GPT) -> dict[str, Tensor]:
    """Every weight once, under the first of its names."""
    first = _first_names(model)
    return {name: value for name, value in model.state_dict().items() if first.get(name, name) == name}


def _settings(config: GPTConfig) -> dict[str, Any]:
    """Every choice, of later options only those that were made: a model without them is read by
    versions that lack them.
    """
    idle = {field.name: field.default for field in dataclasses.fields(config) if field.name in LATER}
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in idle or value != idle[name]}


def find_model(directory: str | Path) -> Path:
    """The directory that holds the model: the one given, or for a training run's directory its
    `best`.

    Raises ConfigError where there is no such directory or no model in it, and for a run whose
    `best` is missing or leads nowhere, or to a checkpoint that another run has left behind.
    """
    directory = Path(directory)
    best, last = directory / BEST, directory / LAST
    if os.path.exists(directory / CONFIG):  # unlike the method of a path it only ever says yes or no
        return directory.resolve()
    fix = "give one that ctrans saved (config.json, model.safetensors), or a training run's"
    if not os.path.exists(directory):
        raise ConfigError(f"there is no checkpoint {str(directory)!r} that can be read: {fix}")
    if not (os.path.lexists(best) or os.path.lexists(last)):
        if os.path.isdir(directory):
            raise ConfigError(f"{str(directory)!r} holds no model of ctrans: {fix}")
        return directory
    if not os.path.exists(best / CONFIG):
        raise ConfigError(
            f"{str(best)!r}, the best model of the run, {'leads nowhere' if os.path.lexists(best) else 'is missing'}: give a "
            f"checkpoint by its own name, as {str(last)!r}, or go on with the run by ctrans train --resume"
        )
    place = best.resolve()  # a run that goes on moves its links
    if os.path.islink(last) and os.path.islink(best) and last.resolve().parent != place.parent:
        raise ConfigError(
            f"{str(best)!r} is of a run that was overwritten: give {str(last)!r}, or go on by ctrans train --resume"
        )
    return place


def load_config(directory: str | Path) -> GPTConfig:
    """The configuration saved there (see `find_model`). Raises ConfigError for a file that is
    missing or damaged, or unknown keys.
    """
    return GPTConfig(**_read_settings(find_model(directory) / CONFIG))


def _read_settings(path: Path) -> dict[str, Any]:
    settings = read_json(path)
    names = {field.name for field in dataclasses.fields(GPTConfig)}
    if not isinstance(settings, dict):
        raise ConfigError(f"{str(path)!r} holds no object: it is not a checkpoint of ctrans")
    for key in settings:
        if key not in names:
            raise unknown("key in config.json", key, names)
    return settings


def load(directory: str | Path, *, merge: bool = True) -> GPT:
    """The model saved there (see `find_model`), in the dtype its weights were saved in, on the CPU.

    Low-rank updates are added to the weights, or left as they are without `merge`. Raises
    ConfigError for files that are missing, damaged, of another run, or pickles, a configuration
    that is not the one that was saved with the weights, weights that do not fit it, and updates
    without the base that they are of.
    """
    directory = find_model(directory)
    check_bound(directory)
    updates = os.path.exists(directory / ADAPTER)
    path = directory / (ADAPTER if updates else WEIGHTS)
    settings = _read_settings(directory / CONFIG)
    config = GPTConfig(**settings)
    check_buildable(config, seed=0)
    weights, metadata = read_weights(path)
    if metadata.get(CONFIG_DIGEST) not in (None, _digest(settings)):
        raise ConfigError(
            f"{str(directory / CONFIG)!r} was changed since the weights were saved; bring back the one that {str(path)!r} was saved "
            "with"
        )
    if not updates:
        return _filled(GPT(config), weights, path)
    model = update_like(_base_of(path, config, metadata.get(BASE_DIGEST)), weights, path)
    return merge_updates(model) if merge else model


def _base_of(adapter: Path, config: GPTConfig, digest: str | None) -> GPT:
    """The model that this file's updates are of. Raises ConfigError where it is not there, or is
    another.
    """
    place = adapter.parent.parent / BASE
    if not os.path.exists(place / CONFIG):
        raise ConfigError(
            f"{str(adapter)!r} updates weights that are not in {str(place)!r}: bring that directory of its run there, beside its own"
        )
    base = load(place)
    if base.config != config or sha256_of(_weights(base)) != digest:
        raise ConfigError(f"{str(adapter)!r} updates other weights than those in {str(place)!r}: bring back the base of its run")
    return base


def _filled(model: GPT, weights: Mapping[str, Tensor], path: Path) -> GPT:
    """The model with these weights, which were read there. Raises ConfigError where they do not fit
    it.
    """
    first = _first_names(model)
    expected = {name: tuple(value.shape) for name, value in _weights(model).items()}
    for name in sorted(expected.keys() | weights.keys()):
        have = tuple(weights[name].shape) if name in weights else "absent"
        want = expected.get(name, "absent")
        if have != want:
            raise ConfigError(f"{str(path)!r} does not fit its config.json: {name} is {have}, expected {want}")
    parameters = {name: nn.Parameter(value) for name, value in weights.items()}
    # one Parameter under all its names stays shared
    model.load_state_dict({name: parameters[first.get(name, name)] for name in model.state_dict()}, assign=True)
    return model


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every parameter's name, to the first of the names that it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 of what the configuration says, however its file is laid out."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
