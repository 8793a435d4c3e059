"""Times in interleaved pairs, and the machine's limit: products alone, at the shapes of the
work.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

LEAST = 0.05
"""Seconds that a sample takes at least: short work is repeated."""
MIB = 2**20
Work = Callable[[], object]
Quartiles = tuple[float, float, float]


class Sample(NamedTuple):
    """Seconds by the clock on the wall, and of processor time of all threads."""

    wall: float
    processor: float


Pair = tuple[Sample, Sample]


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. Times are medians in seconds of one piece of work; a ratio is ours over the
    peer's, with its quartiles over pairs.

    - `limit`, `limit_is`: the seconds that this machine needs at least, and for what
    - `aim`: the ratio to the peer that issue 36 asks for at most; None without a peer or an aim
    - `estimated`: whether the figure is extrapolated
    """

    name: str
    seconds: float
    processor: float
    pairs: int
    peer: str = ""
    peer_seconds: float | None = None
    ratio: Quartiles | None = None
    processor_ratio: Quartiles | None = None
    limit: float | None = None
    limit_is: str = ""
    aim: float | None = None
    note: str = ""
    estimated: bool = False


def timed(work: Work, repeats: int = 1) -> Sample:
    """Of one call, as the mean of some."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return Sample(
        (time.perf_counter() - wall) / repeats, (time.process_time() - processor) / repeats
    )


def repeats_of(work: Work) -> int:
    """How many calls make a sample. The first call warms up."""
    work()
    return max(1, round(LEAST / max(timed(work).wall, 1e-9)))


def pairs(ours: Work, peer: Work, rounds: int) -> list[Pair]:
    """Samples of both, one right after the other, in alternating order."""
    often = [repeats_of(work) for work in (ours, peer)]
    found: list[Pair] = []
    for k in range(rounds):
        if k % 2:
            theirs = timed(peer, often[1])
            found.append((timed(ours, often[0]), theirs))
        else:
            own = timed(ours, often[0])
            found.append((own, timed(peer, often[1])))
    return found


def alone(work: Work, rounds: int) -> list[Sample]:
    """Samples without a peer."""
    often = repeats_of(work)
    return [timed(work, often) for _ in range(rounds)]


def of_process(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Sample:
    """Of a process from its start to its end, with what it starts."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        command,
        env=None if environment is None else dict(environment),
        check=True,
        capture_output=True,
    )
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - wall
    return Sample(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def quartiles(values: Sequence[float]) -> Quartiles:
    """The lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def row_of_pairs(name: str, peer: str, found: Sequence[Pair], **more: Any) -> Row:
    """The medians, and the ratios of the pairs."""
    own, theirs = zip(*found, strict=True)
    return Row(
        name,
        statistics.median(sample.wall for sample in own),
        statistics.median(sample.processor for sample in own),
        len(found),
        peer,
        statistics.median(sample.wall for sample in theirs),
        quartiles([a.wall / b.wall for a, b in found]),
        quartiles([a.processor / max(b.processor, 1e-9) for a, b in found]),
        **more,
    )


def row_alone(name: str, samples: Sequence[Sample], **more: Any) -> Row:
    """The medians, without a peer."""
    wall, processor = (statistics.median(each) for each in zip(*samples, strict=True))
    return Row(name, wall, processor, len(samples), **more)


class Products(TorchDispatchMode):
    """Counts products of matrices and attention kernels by their shapes: what torch's flop counter
    counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.again: dict[str, Work] = {}
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=made)
            key = str((function, tree_map_only(Tensor, _shape, (args, kwargs))))
            self.calls[key] = self.calls.get(key, 0) + 1
            if key not in self.again:
                given = tree_map_only(Tensor, _another, (args, kwargs))
                self.again[key] = lambda: function(*given[0], **given[1])
        return made

    def seconds(self) -> float:
        """Of all of them alone: the best time of each shape, warm."""
        with torch.no_grad():
            return sum(count * best(self.again[key]) for key, count in self.calls.items())


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"


def _another(tensor: Tensor) -> Tensor:
    """A tensor of that layout with other entries."""
    entries = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    make = torch.randn if tensor.is_floating_point() else torch.zeros
    return make(entries, dtype=tensor.dtype, device=tensor.device).as_strided(
        tensor.shape, tensor.stride()
    )


def best(work: Work, rounds: int = 5) -> float:
    """The least time of a call."""
    work()
    often = max(1, round(2e-3 / max(timed(work).wall, 1e-9)))
    return min(timed(work, often).wall for _ in range(rounds))


def products_alone(work: Work) -> float:
    """Seconds that the products of this work take alone: no run with these products is faster on
    this machine.
    """
    with Products() as seen:
        work()
    return seen.seconds()


PRODUCTS = "its products alone"


def environment(**more: str) -> dict[str, str]:
    """That of child processes: as a user's, who keeps bytecode."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **more}
