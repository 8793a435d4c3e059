"""Reductions of tensors on their device: lengths, shares, a sample of tokens; and their transfer to
the host.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")
SAMPLE = 256
"""The number of tokens of a batch at which growth since X_0 and logits are measured."""
GRAPH = 64
"""The number of nodes of a loss's graph that are looked at."""
SAME = ("View", "UnsafeView", "Reshape", "Slice", "Transpose", "TBackward", "Permute", "ToCopy", "Clone", "Squeeze", "Unsqueeze",
        "Alias", "Select", "Index", "LogSoftmax")  # fmt: skip
"""Nodes of a graph that move or copy entries, and the log of a softmax, which may follow another.
"""


def length(x: Tensor, order: float = 2) -> Tensor:
    """The norm of all entries, in at least float32, without a copy of x."""
    found: Tensor = torch.linalg.vector_norm(x, order, dtype=wide(x))
    return found


def wide(x: Tensor) -> torch.dtype:
    """The dtype of sums: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The length of all tensors together, on their device. If they are sharded, every process must
    call this.
    """
    if not tensors:
        return torch.zeros(())
    parts = [part.coalesce().values() if part.is_sparse else part for part in tensors]
    whole = [part for part in parts if not hasattr(part, "full_tensor")]
    sharded = [part.norm().full_tensor() for part in parts if hasattr(part, "full_tensor")]
    norms = [*(torch._foreach_norm(whole) if whole else ()), *sharded]
    return length(torch.stack([norm.float() for norm in norms]))


def to_host(found: Mapping[Key, Tensor]) -> dict[Key, list[float]]:
    """All numbers on the host, by one transfer from each device."""
    parts = {key: value.detach().float().reshape(-1) for key, value in found.items()}
    values: dict[Key, list[float]] = {}
    for device in {part.device for part in parts.values()}:
        here = {key: part for key, part in parts.items() if part.device == device}
        numbers = torch.cat(list(here.values())).tolist()
        for key, part in here.items():
            values[key], numbers = numbers[: part.numel()], numbers[part.numel() :]
    return values


def longest(x: Tensor) -> Tensor:
    """The length of the longest token."""
    found: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x)).max()
    return found


def evenness(shares: Tensor) -> Tensor:
    """exp(entropy)/n of n shares: 1 for equal ones, 1/n if one has all."""
    found: Tensor = torch.special.entr(shares).sum().exp() / len(shares)
    return found


def sample(x: Tensor) -> Tensor:
    """The first tokens of a batch, (tokens, width)."""
    return x.detach().reshape(-1, x.shape[-1])[:SAMPLE]


def sample_rows(x: Tensor) -> Tensor:
    """`sample` in float32."""
    return sample(x).float()


def detached(value: Tensor | float | None) -> Any:
    """The mean of a tensor on its device, without its graph; a number as it is. Raises an error of
    torch or Python for a value that is neither, and for a tensor on meta.
    """
    if isinstance(value, Tensor):
        if value.is_meta:
            raise ValueError("a tensor on meta has no value")
        value = value.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        if value.numel() == 1:
            return value.reshape(()).clone()
        return value.float().mean()
    if value is None:
        return None
    return float(value)


def stacked_softmaxes(loss: object) -> dict[str, Any]:
    """`softmaxes`, the number of them one upon another at the end of a loss's graph, if it has
    one.
    """
    nodes = [getattr(loss, "grad_fn", None)]
    count = 0
    for _ in range(GRAPH):
        if nodes:
            node = nodes.pop(0)
        else:
            node = None
        if node is None:
            continue
        name = node.name()
        if name.startswith("LogSoftmax") and not count:
            nodes = []
            count = 1
        elif name.startswith("Softmax"):
            count += count > 0
        elif count and not name.startswith(SAME):
            continue
        nodes += [each for each, _ in node.next_functions]
    if count:
        return {"softmaxes": float(count)}
    return {}


def host_numbers(values: Sequence[Any]) -> list[float]:
    """The values on the host, in one transfer from a device; nan for None."""
    found = to_host({i: value for i, value in enumerate(values) if isinstance(value, Tensor)})
    return [
        found[i][0] if isinstance(value, Tensor) else math.nan if value is None else float(value)
        for i, value in enumerate(values)
    ]


def largest(pairs: Sequence[tuple[int, float]]) -> float:
    """The largest value of (step, value) pairs; the first inf or nan if there is one."""
    values = [value for _, value in pairs]
    return next((value for value in values if not math.isfinite(value)), max(values))


def growth_exponent(added: Sequence[float]) -> float | None:
    """p of |X_k - X_0| ~ k^p by least squares of the logarithms from the middle of the depth to its
    end; None for fewer than two points.
    """
    half = range(max(1, len(added) // 2), len(added) + 1)
    points = [(math.log(k), math.log(added[k - 1])) for k in half if 0 < added[k - 1] < math.inf]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope
