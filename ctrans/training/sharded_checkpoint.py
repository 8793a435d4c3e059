"""Checkpoints of a run whose optimiser is spread over processes, by torch.distributed.checkpoint in its safetensors format.

Every process writes its part, and reads whatever parts make up its own: a run goes on with any number of processes, or alone.
The weights are written whole, as every other command reads them.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from ctrans.model import checkpoint
from ctrans.model.gpt import GPT
from ctrans.training.processes import Processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.training_state import (
    State,
    optimiser_tensors,
    parameter_of,
    read_optimiser,
    restore_optimiser,
    write_optimiser,
)

SHARDS = "optimiser"
"""The directory of the processes' files in a checkpoint; without it the optimiser is in one file."""


def save_shards(store: RunDirectory, state: State, model: GPT, optimiser: torch.optim.Optimizer, processes: Processes) -> None:
    """Each process writes its part of the optimiser, the first one the weights and the state too."""
    # these import for a second
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    step = state.progress.step
    with store.unharmed(step):
        if processes.first:
            store.prepare(step)
        processes.wait()
        directory, tensors = store.temporary(step), optimiser_tensors(model, optimiser)
        if tensors:
            save(tensors, storage_writer=HuggingFaceStorageWriter(path=str(directory / SHARDS), save_distributed=True))
        weights = {name: _whole(value).cpu() for name, value in model.state_dict().items()}
        if processes.first:
            checkpoint.save(_with_weights(model, weights), directory)
            if not tensors:
                write_optimiser(directory, tensors)
            state.write(directory)
            store.commit(step, best=state.progress.best_step, good=state.progress.good)
    processes.wait()


def restore(directory: Path, model: GPT, optimiser: torch.optim.Optimizer) -> None:
    """Gives the optimiser what the checkpoint has for it, one file or many, as this process holds it."""
    shards = directory / SHARDS
    restore_optimiser(model, optimiser, _read_shards(shards, model) if shards.exists() else _read_whole(directory, model))


def _whole(value: Tensor) -> Tensor:
    """All of a weight, of which this process may have a part; buffers are whole everywhere."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


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


def _with_weights(model: GPT, weights: dict[str, Tensor]) -> GPT:
    """A model of the same architecture with these weights, all in this process."""
    dtype = next(iter(weights.values())).dtype
    whole = GPT(model.config).to(dtype)
    whole.load_state_dict(weights)
    return whole
