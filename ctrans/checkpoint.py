"""A model on disk: a directory with the configuration as `config.json` and the weights as `model.safetensors`. No pickle."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from ctrans.gpt import GPT, GPTConfig
from solvers import ConfigError
from solvers.errors import unknown

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save(model: GPT, directory: str | Path) -> None:
    """Writes the model there, each file whole or not at all. Raises ConfigError where it cannot be written."""
    directory = Path(directory)
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in [
            (WEIGHTS, safetensors.torch.save(weights)),
            (CONFIG, json.dumps(dataclasses.asdict(model.config), indent=1).encode()),
        ]:
            temporary = directory / f".{name}.{os.getpid()}"
            temporary.write_bytes(data)
            os.replace(temporary, directory / name)
    except OSError as error:
        raise ConfigError(f"cannot write a checkpoint to {str(directory)!r}: {error.strerror or error}") from None


def load_config(directory: str | Path) -> GPTConfig:
    """The configuration saved there. Raises ConfigError for a file that is missing or damaged, or keys that are unknown."""
    try:
        settings: Any = json.loads(_read(Path(directory) / CONFIG))
    except ValueError as error:
        raise ConfigError(f"{str(Path(directory) / CONFIG)!r} is no JSON: {error}") from None
    names = {field.name for field in dataclasses.fields(GPTConfig)}
    if not isinstance(settings, dict):
        raise ConfigError(f"{str(Path(directory) / CONFIG)!r} holds no object: it is not a checkpoint of ctrans")
    for key in settings:
        if key not in names:
            raise unknown("key in config.json", key, names)
    return GPTConfig(**settings)


def load(directory: str | Path) -> GPT:
    """The model saved there, in the dtype its weights were saved in, on the CPU.

    Raises ConfigError for files that are missing or damaged, and weights that do not fit the configuration.
    """
    model = GPT(load_config(directory))
    path = Path(directory) / WEIGHTS
    try:
        weights = safetensors.torch.load(_read(path))
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{str(path)!r} is no whole safetensors file: {error}") from None
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        have = tuple(weights[name].shape) if name in weights else "absent"
        want = expected.get(name, "absent")
        if have != want:
            raise ConfigError(f"{str(path)!r} does not fit its config.json: {name} is {have}, expected {want}")
    model.load_state_dict(weights, assign=True)
    return model


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
