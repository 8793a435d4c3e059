"""Checkpoints of a run: the model's weights, the run's state, and the optimiser's tensors.

With FSDP each process writes its part of the optimiser, by torch.distributed.checkpoint in its
safetensors format. A run can resume with any number of processes. The first process writes all
else, with whole weights, as other commands read them.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ctrans.base.printable import printable
from ctrans.model import checkpoint
from ctrans.model.gpt import GPT
from ctrans.model.sums import OPTIMISER, SHARDS
from ctrans.training.processes import Processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.training_state import State
from solvers import ConfigError

NAME_END = ":"
"""Separates the names of a parameter and of a tensor of the optimiser:
depth.sublayers.0.field.qkv.weight:exp_avg.
"""


def save_checkpoint(
    store: RunDirectory,
    state: State,
    model: GPT,
    optimiser: torch.optim.Optimizer,
    processes: Processes,
    *,
    sharded: bool,
) -> None:
    """Writes the checkpoint of the state's step. With `sharded`, each process writes its part of
    the optimiser.
    """
    if not (sharded or processes.first):
        return
    progress = state.progress
    with store.saving(
        progress.step,
        best=progress.best_step,
        good=progress.good,
        first=processes.first,
        wait=processes.wait if sharded else None,
    ) as directory:
        tensors = optimiser_tensors(model, optimiser)
        in_shards = sharded and bool(tensors)
        if in_shards:
            _write_shards(directory / SHARDS, tensors)
        if sharded:
            model = _with_whole_weights(model)
        if processes.first:
            checkpoint.save(model, directory)
            if not in_shards:
                on_host = {
                    name: value.detach().cpu().contiguous() for name, value in tensors.items()
                }
                safetensors.torch.save_file(on_host, directory / OPTIMISER)
            state.write(directory)


def restore(directory: Path, model: GPT, optimiser: torch.optim.Optimizer) -> None:
    """Restores this process's part of the optimiser from the checkpoint's file or files. Raises
    ConfigError for tensors of another model.
    """
    shards = directory / SHARDS
    if shards.exists():
        tensors = _read_shards(shards, model)
    else:
        tensors = _read_whole(directory, model)
    parameters = dict(model.named_parameters())
    numbers: dict[nn.Parameter, int] = {}
    quantities: list[set[str]] = []
    for group in optimiser.param_groups:
        of_group = _quantities(optimiser, group)
        for parameter in group["params"]:
            numbers[parameter] = len(quantities)
            quantities.append(of_group)
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        name = parameter_of(full_name)
        key = full_name.rpartition(NAME_END)[2]
        if name not in parameters or (value.dim() and value.shape != parameters[name].shape):
            raise ConfigError(
                f"the optimiser's {full_name} has shape {tuple(value.shape)} and fits no weight of"
                " this model: use the checkpoint's model"
            )
        state.setdefault(numbers[parameters[name]], {})[key] = value
    for number, saved in state.items():
        if saved.keys() != quantities[number]:
            raise ConfigError(
                f"{str(directory)!r} has {', '.join(map(printable, sorted(saved)))} of the"
                f" optimiser for weight {number}, and {type(optimiser).__name__} needs"
                f" {', '.join(sorted(quantities[number]))}: use the checkpoint's settings, or an"
                " earlier one"
            )
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def _quantities(optimiser: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """The names of the tensors that a step of such an optimiser keeps for a weight of the group."""
    weight = nn.Parameter(torch.zeros([1] * group["params"][0].dim()))
    weight.grad = torch.ones_like(weight)
    takes = inspect.signature(type(optimiser)).parameters
    options = {name: value for name, value in optimiser.defaults.items() if name in takes}
    of_one_weight = type(optimiser)([{**group, "params": [weight]}], **options)
    of_one_weight.step()
    state = of_one_weight.state[weight]
    return {name for name, value in state.items() if isinstance(value, Tensor)}


def full(value: Tensor) -> Tensor:
    """The whole of a tensor, of which this process may have a part."""
    if hasattr(value, "full_tensor"):
        gathered: Tensor = value.full_tensor()
        return gathered
    return value


def _with_whole_weights(model: GPT) -> GPT:
    """A copy of the model with whole weights in this process. All processes must call this."""
    weights = {name: full(value).cpu() for name, value in model.state_dict().items()}
    copy = GPT(model.config).to(next(iter(weights.values())).dtype)
    copy.load_state_dict(weights)
    return copy


def _write_shards(directory: Path, tensors: dict[str, Tensor]) -> None:
    # the imports take a second
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(
        tensors, storage_writer=HuggingFaceStorageWriter(path=str(directory), save_distributed=True)
    )


def _read_whole(directory: Path, model: GPT) -> dict[str, Tensor]:
    """The tensors of the checkpoint's one file. Raises ConfigError if it is missing or damaged."""
    path = directory / OPTIMISER
    parameters = dict(model.named_parameters())
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{str(path)!r} is no complete safetensors file: {error}") from None
    return {
        name: _spread(value, parameters.get(parameter_of(name))) for name, value in tensors.items()
    }


def _spread(value: Tensor, parameter: Tensor | None) -> Tensor:
    """The part of a whole tensor that fits this process's part of the parameter."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or parameter is None or not value.dim():
        return value
    from torch.distributed.tensor import distribute_tensor

    placements = parameter.placements  # type: ignore[attr-defined]  # a DTensor
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def _read_shards(directory: Path, model: GPT) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(path=str(directory))
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        parameter = parameters.get(parameter_of(name))
        size = stored.size  # type: ignore[union-attr]  # safetensors hold tensors only
        if parameter is None or parameter.shape != size:
            tensors[name] = torch.zeros(size)
        else:
            tensors[name] = torch.zeros_like(parameter.detach())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    return tensors


def optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's tensors, by parameter and quantity."""
    named = dict(model.named_parameters())
    assert optimiser.state.keys() <= set(named.values()), (
        "a checkpoint has the tensors of the model's parameters only"
    )
    return {
        f"{name}{NAME_END}{key}": value
        for name, parameter in named.items()
        for key, value in optimiser.state.get(parameter, {}).items()
        if isinstance(value, Tensor)  # momentum is None before the first step
    }


def parameter_of(full_name: str) -> str:
    """The name of the parameter of a tensor of the optimiser."""
    return full_name.rpartition(NAME_END)[0]
