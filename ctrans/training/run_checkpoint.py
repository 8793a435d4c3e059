"""Checkpoints of a run: the model's weights and the run's state, written by the first process, and
the optimiser's tensors.

With FSDP the optimiser is spread over processes. Every process then writes its part, by
torch.distributed.checkpoint in its safetensors format, and reads whatever parts make up its own: a
run goes on with any number of processes, or alone. The weights are written whole, as every other
command reads them.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ctrans.model import checkpoint
from ctrans.model.gpt import GPT
from ctrans.training.processes import Processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.training_state import State
from solvers import ConfigError

OPTIMISER = "optimiser.safetensors"
SHARDS = "optimiser"
"""The directory of the processes' files in a checkpoint; without it the optimiser is in one file.
"""
NAME_END = ":"
"""Stands between a parameter's name and what the optimiser keeps for it, as in
depth.sublayers.0.field.qkv.weight:exp_avg.
"""


def save_checkpoint(
    store: RunDirectory, state: State, model: GPT, optimiser: torch.optim.Optimizer, processes: Processes, *, sharded: bool
) -> None:
    """Writes the checkpoint of the state's step. With `sharded` each process writes its part of the
    optimiser.
    """
    if not (sharded or processes.first):
        return
    progress, wait = state.progress, processes.wait if sharded else lambda: None
    with store.saving(progress.step, best=progress.best_step, good=progress.good, first=processes.first, wait=wait) as directory:
        tensors = optimiser_tensors(model, optimiser)
        if sharded and tensors:
            _write_shards(directory / SHARDS, tensors)
        whole = _with_whole_weights(model) if sharded else model
        if processes.first:
            checkpoint.save(whole, directory)
            if not (sharded and tensors):
                write_optimiser(directory, tensors)
            state.write(directory)


def restore(directory: Path, model: GPT, optimiser: torch.optim.Optimizer) -> None:
    """Gives the optimiser what the checkpoint has for it, one file or many, as this process holds
    it.
    """
    shards = directory / SHARDS
    restore_optimiser(model, optimiser, _read_shards(shards, model) if shards.exists() else _read_whole(directory, model))


def full(value: Tensor) -> Tensor:
    """All of a tensor of which this process may have a part."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def _with_whole_weights(model: GPT) -> GPT:
    """A model of the same architecture whose weights are all in this process. Every process has to
    call this.
    """
    weights = {name: full(value).cpu() for name, value in model.state_dict().items()}
    whole = GPT(model.config).to(next(iter(weights.values())).dtype)
    whole.load_state_dict(weights)
    return whole


def _write_shards(directory: Path, tensors: dict[str, Tensor]) -> None:
    # these import for a second
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(tensors, storage_writer=HuggingFaceStorageWriter(path=str(directory), save_distributed=True))


def _read_whole(directory: Path, model: GPT) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {name: _spread(value, parameters.get(parameter_of(name))) for name, value in read_optimiser(directory).items()}


def _spread(value: Tensor, parameter: Tensor | None) -> Tensor:
    """The part of a whole tensor that belongs to this process's part of the parameter."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or parameter is None or not value.dim():
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]  # a DTensor


def _read_shards(directory: Path, model: GPT) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(path=str(directory))
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        like = parameters.get(parameter_of(name))
        size = stored.size  # type: ignore[union-attr]  # safetensors hold tensors only
        tensors[name] = torch.zeros(size) if like is None or like.shape != size else torch.zeros_like(like.detach())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    return tensors


def optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimiser keeps, by parameter and quantity."""
    named = dict(model.named_parameters())
    assert optimiser.state.keys() <= set(named.values()), "what the optimiser keeps for other parameters would be lost"
    return {
        f"{name}{NAME_END}{key}": value
        for name, parameter in named.items()
        for key, value in optimiser.state.get(parameter, {}).items()
        if isinstance(value, Tensor)  # momentum that there is none of yet is None
    }


def parameter_of(full_name: str) -> str:
    """The name of the parameter that the optimiser keeps that for."""
    return full_name.rpartition(NAME_END)[0]


def restore_optimiser(model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Gives the optimiser what it kept. ConfigError where that belongs to another model."""
    parameters = dict(model.named_parameters())
    order = {parameter: i for i, parameter in enumerate(p for group in optimiser.param_groups for p in group["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        name, key = parameter_of(full_name), full_name.rpartition(NAME_END)[2]
        if name not in parameters or (value.dim() and value.shape != parameters[name].shape):
            raise ConfigError(f"the optimiser's {full_name} has shape {tuple(value.shape)}, which this model has nothing of")
        state.setdefault(order[parameters[name]], {})[key] = value
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def write_optimiser(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Writes the tensors there."""
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    safetensors.torch.save_file(whole, directory / OPTIMISER)


def read_optimiser(directory: Path) -> dict[str, Tensor]:
    """The tensors written there. ConfigError for a file that is missing or no safetensors file."""
    path = directory / OPTIMISER
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{str(path)!r} is no whole safetensors file: {error}") from None
