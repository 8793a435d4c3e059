"""The processes of a run, and their collective operations."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from solvers import ConfigError, SolveError

BACKENDS = {"cuda": "nccl"}
"""The communication backend by type of device; gloo on all others."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""The environment variable of torchrun with the number of restarts."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process's device, and its rank among `world` processes. With one process, reductions are
    the identity.
    """

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in each of them."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """The largest over all processes, in each of them."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def wait(self) -> None:
        """Waits until all processes call this."""
        if self.world > 1:
            dist.barrier()

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world > 1:
            dist.all_reduce(values, operation)
        return values


def restarts() -> bool:
    """Whether torchrun started this process, and would restart it with the same command."""
    return RESTARTS in os.environ


def number_of_processes() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return _number("WORLD_SIZE", "1")


def _number(name: str, default: str) -> int:
    """The whole number in an environment variable of torchrun's."""
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise ConfigError(
            f"the environment variable {name} is {value!r}, and torchrun sets a number: unset it,"
            " or start with torchrun"
        )
    return int(value)


@contextlib.contextmanager
def processes(name: str, device: torch.device) -> Iterator[Processes]:
    """Connects the processes that torchrun started; with `name` "none" there is one.

    On CUDA each process uses the device of its local rank. Raises ConfigError if torchrun did not
    start this process, or started several with `name` "none"; SolveError if another process ends
    early.
    """
    world = number_of_processes()
    if name == "none":
        if world > 1:
            raise ConfigError(f"torchrun started {world} processes: choose --parallel ddp or fsdp")
        yield Processes(device)
        return
    if "RANK" not in os.environ:
        raise ConfigError(
            f"--parallel {name} needs processes: torchrun --nproc-per-node 2 -m ctrans train"
            f" --parallel {name} ..."
        )
    _number("RANK", "0")
    if device.type == "cuda":
        device = torch.device("cuda", _number("LOCAL_RANK", "0"))
        torch.cuda.set_device(device)
    store, rank, world = next(rendezvous("env://"))
    # torchrun may keep its store over restarts, with addresses of ended processes
    store = PrefixStore(f"attempt {os.environ.get(RESTARTS, '0')}", store)
    dist.init_process_group(
        BACKENDS.get(device.type, "gloo"), store=store, rank=rank, world_size=world
    )
    try:
        yield Processes(device, dist.get_rank(), dist.get_world_size())
        dist.barrier()  # a process that leaves early would interrupt the others
    except RuntimeError as error:
        if "by peer" not in str(error):  # gloo has no error type
            raise
        raise SolveError(
            "another process of this run ended, so this one stops: see the message of that process"
        ) from None
    finally:
        dist.destroy_process_group()


def get_device(name: str) -> torch.device:
    """The device of that name. Raises ConfigError if this machine does not have it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    # backends raise different errors
    except (RuntimeError, AssertionError, ImportError, ValueError, TypeError):
        raise ConfigError(
            f"device {name!r} is not available here: use --device cpu, or install a torch that"
            " supports it"
        ) from None
    if device.type == "meta":
        raise ConfigError("device 'meta' holds no numbers: use --device cpu")
    return device
