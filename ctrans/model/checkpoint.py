"""A model on disk: a directory with the configuration as `config.json` and the weights as `model.safetensors`. No pickle.

Weights that several blocks share (`GPTConfig.depth_weights`) are stored once, under the first of their names. A checksum of all
weights stands in the file's metadata, because a flipped bit in a weight would otherwise be a weight, and a digest of the
configuration, because the same weights with another dt would otherwise be another model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ctrans.fields import AttentionOptions
from ctrans.given_files import read_file, read_json
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, check_buildable
from ctrans.model.sums import check_bound
from ctrans.weights.on_demand import check_present
from solvers import ConfigError
from solvers.errors import unknown

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BEST, LAST = "best", "last"
"""Where the directory of a training run has its models: links to checkpoints."""
CHECKSUM, CONFIG_DIGEST = "crc32", "config_sha256"
"""What the metadata of the weights' file call them; a file without them is not checked by them."""
PICKLES = {b"PK\x03\x04": "a zip archive, as torch.save writes", b"\x80": "a pickle"}
"""How files begin that are often taken for weights, and are never read here."""


def save(model: GPT, directory: str | Path) -> None:
    """Writes the model there, each file whole or not at all, also if the machine stops. Raises ConfigError where it cannot be
    written.
    """
    check_present(model, "saved")
    directory = Path(directory)
    first = _first_names(model)
    weights = {
        name: value.detach().cpu().contiguous() for name, value in model.state_dict().items() if first.get(name, name) == name
    }
    settings = _settings(model.config)
    metadata = {"format": "pt", CHECKSUM: _checksum(weights), CONFIG_DIGEST: _digest(settings)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(directory / WEIGHTS, safetensors_bytes(weights, metadata))
        write_durably(directory / CONFIG, json.dumps(settings, indent=1).encode())
    except OSError as error:
        raise ConfigError(f"cannot write a checkpoint to {str(directory)!r}: {error.strerror or error}") from None


def _settings(config: GPTConfig) -> dict[str, Any]:
    """Every choice, of options that came later only those that were made: a model without them is read by versions that lack them."""
    idle = dataclasses.asdict(AttentionOptions()) | {"tied": True}
    settings = dataclasses.asdict(config)
    return {name: value for name, value in settings.items() if name not in idle or value != idle[name]}


def safetensors_bytes(weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file, the same bytes for the same weights and metadata: the library writes metadata in an order of chance.

    The header is 8 bytes of length and then JSON, padded with spaces; what follows is addressed from its end.
    """
    made: bytes = safetensors.torch.save(dict(weights), dict(metadata))
    end = 8 + int.from_bytes(made[:8], "little")
    header = json.loads(made[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps({"__metadata__": header.pop("__metadata__"), **header}, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text + b" " * (-len(text) % 8)
    return len(padded).to_bytes(8, "little") + padded + made[end:]


def write_durably(path: Path, data: bytes) -> None:
    """Writes the file whole or leaves what was there, and returns when it is on the disk. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)  # the new name is on the disk only when its directory is
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def find_model(directory: str | Path) -> Path:
    """The directory that holds the model: the one given, or for a training run's directory its `best`.

    Raises ConfigError where there is no such directory or no model in it, and for a run whose `best` is missing or leads nowhere, or
    to a checkpoint that another run has left behind.
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
    """The configuration saved there (see `find_model`). Raises ConfigError for a file that is missing or damaged, or unknown
    keys.
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


def load(directory: str | Path) -> GPT:
    """The model saved there (see `find_model`), in the dtype its weights were saved in, on the CPU.

    Raises ConfigError for files that are missing, damaged, of another run, or pickles, a configuration that is not the one that was
    saved with the weights, and weights that do not fit it.
    """
    directory = find_model(directory)
    check_bound(directory)
    path = directory / WEIGHTS
    settings = _read_settings(directory / CONFIG)
    config = GPTConfig(**settings)
    check_buildable(config, seed=0)
    weights, digest = _read_weights(path)
    if digest not in (None, _digest(settings)):
        raise ConfigError(
            f"{str(directory / CONFIG)!r} was changed since the weights were saved; bring back the one that {str(path)!r} was saved "
            "with"
        )
    model = GPT(config)
    first = _first_names(model)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items() if first.get(name, name) == name}
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


def _read_weights(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """The weights, and the digest of the configuration that they were saved with if it was recorded."""
    data = read_file(path)
    try:
        weights = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        pickled = next((what for beginning, what in PICKLES.items() if data.startswith(beginning)), None)
        reason = f"it is {pickled}, and reading that may run code" if pickled else error
        raise ConfigError(f"{str(path)!r} is no whole safetensors file: {reason}") from None
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    if metadata.get(CHECKSUM) not in (None, _checksum(weights)):
        raise ConfigError(f"{str(path)!r} is damaged: its weights are not those that were saved (checksum {CHECKSUM})")
    for name, value in weights.items():
        if not value.is_floating_point():
            raise ConfigError(f"{str(path)!r} is damaged: {name} holds {value.dtype}, and weights are floating-point numbers")
    return weights, metadata.get(CONFIG_DIGEST)


def _checksum(weights: Mapping[str, Tensor]) -> str:
    """CRC-32 of names, types, shapes and bytes of all tensors, in the order of their names."""
    crc = 0
    for name in sorted(weights):
        value = weights[name]
        crc = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), crc)
        crc = zlib.crc32(value.contiguous().flatten().view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def _digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 of what the configuration says, however its file is laid out."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
