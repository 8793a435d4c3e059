"""Kinds of parallelism: none, replicated (DDP), or with sharded weights (FSDP2)."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ctrans.dynamics.weights.functions_of_depth import coefficients_of
from ctrans.training.objective import Objective
from ctrans.training.optimiser import OPTIMISERS
from ctrans.training.settings import TrainConfig, attached_gradients
from solvers import GRADIENTS, ConfigError, look_up


@runtime_checkable
class MicroBatch(Protocol):
    """The context of the passes of a micro-batch. After the `last` one the processes exchange
    gradients.
    """

    def __call__(self, module: nn.Module, *, last: bool) -> AbstractContextManager[None]: ...


@dataclasses.dataclass(frozen=True)
class Parallel:
    """A kind of parallelism."""

    wrap: Callable[[Objective, torch.device], nn.Module]
    """Wraps the objective for this process."""
    micro_batch: MicroBatch
    saves: bool = True
    """Whether a run writes checkpoints."""
    sharded: bool = False
    """Whether a process has all weights only while it uses them."""


def _replicate(objective: Objective, device: torch.device) -> nn.Module:
    device_ids = None
    if device.type == "cuda":
        device_ids = [device.index]
    return DistributedDataParallel(objective, device_ids=device_ids)


def _shard(objective: Objective, device: torch.device) -> nn.Module:
    """Makes each map a unit. The root, which stays whole during a pass, has norms and embeddings,
    which are used outside of a module's call, and maps that share coefficients in depth.
    """
    # the import takes a second
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # the solver adds velocities out of place, so views are safe
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning
    )
    for sublayer in objective.model.depth.sublayers:
        if coefficients_of([sublayer]):
            continue
        for branch in sublayer.branches.values():
            fully_shard(branch.field)
            for method in ("auxiliary", "load"):  # they use weights outside of a forward pass
                if hasattr(branch.field, method):
                    register_fsdp_forward_method(branch.field, method)
    # reshard the root too: without a backward pass, an evaluation would leave other parameters than
    # the optimiser has
    fully_shard(objective, reshard_after_forward=True)
    return objective


def _reduce_after_last(module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    if last:
        return nullcontext()
    return module.no_sync()  # type: ignore[operator, no-any-return]  # the wrapper is DDP


def _scatter_after_last(module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    module.set_requires_gradient_sync(last)  # type: ignore[operator]  # fully_shard made it an FSDPModule
    return nullcontext()


PARALLEL: dict[str, Parallel] = {
    "none": Parallel(lambda objective, device: objective, lambda module, last: nullcontext()),
    "ddp": Parallel(_replicate, _reduce_after_last),
    "fsdp": Parallel(_shard, _scatter_after_last, sharded=True),
}


def get_parallel(name: str, config: TrainConfig) -> Parallel:
    """The kind of parallelism of that name. Raises ConfigError for an unknown one, or if it does
    not support the settings.
    """
    parallel = look_up("kind of parallelism", name, PARALLEL)
    if name != "none" and OPTIMISERS[config.optimiser].layerwise:
        raise ConfigError(
            f"optimiser {config.optimiser!r} looks at the states of one process, and {name} has"
            " several: use one process, or another optimiser"
        )
    if parallel.sharded and GRADIENTS[config.gradient].detached:
        raise ConfigError(
            f"{name} frees weights between the passes, when gradient {config.gradient!r} uses them:"
            f" choose gradient {attached_gradients()}, or --parallel ddp"
        )
    if parallel.sharded and config.low_rank:
        raise ConfigError(
            f"{name} shards weights, and low-rank updates need whole ones: leave out --low-rank, or"
            " use ddp"
        )
    if parallel.sharded and config.theta:
        raise ConfigError(
            f"{name} shards weights, and theta needs whole ones: leave out --theta, or use ddp"
        )
    return parallel
