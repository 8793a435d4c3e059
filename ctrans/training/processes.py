"""The processes of a run: which one this is, and what they compute together."""

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
"""What processes on that kind of device talk through; gloo on every other."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Where torchrun tells a process how often it was started again."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process's rank among `world` ones, and its device. Alone, every reduction is the
    identity.
    """

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether it is the one that writes and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in each of them."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """The largest over all processes, in each of them."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world > 1:
            dist.all_reduce(values, operation)
        return values


def restarts() -> bool:
    """Whether torchrun started this process, and would start it again in the same words."""
    return RESTARTS in os.environ


@contextlib.contextmanager
def processes(name: str, device: torch.device) -> Iterator[Processes]:
    """This process among those that torchrun started, ready to talk; alone where `name` is "none".

    On CUDA each process takes the device of its local rank. Raises ConfigError where torchrun did
    not start it, or started several that would not know of each other; SolveError where another one
    is gone.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if name == "none":
        if world > 1:
            raise ConfigError(f"torchrun started {world} processes: say how they share the work, --parallel ddp or fsdp")
        yield Processes(device)
        return
    if "RANK" not in os.environ:
        raise ConfigError(f"--parallel {name} needs processes: torchrun --nproc-per-node 2 -m ctrans train --parallel {name} ...")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    place, rank, world = next(rendezvous("env://"))
    # torchrun may keep its store over restarts, with the addresses of processes that are gone
    place = PrefixStore(f"attempt {os.environ.get(RESTARTS, '0')}", place)
    dist.init_process_group(BACKENDS.get(device.type, "gloo"), store=place, rank=rank, world_size=world)
    try:
        yield Processes(device, dist.get_rank(), dist.get_world_size())
        dist.barrier()  # one that leaves early would cut the others off in what they end with
    except RuntimeError as error:
        if "by peer" not in str(error):  # gloo has no type of error of its own
            raise
        raise SolveError("another process of this run ended, and this one cannot go on alone: see what it said") from None
    finally:
        dist.destroy_process_group()
