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
PASSED_OVER = (
    "View",
    "UnsafeView",
    "Reshape",
    "Slice",
    "Transpose",
    "TBackward",
    "Permute",
    "ToCopy",
    "Clone",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Select",
    "Index",
    "LogSoftmax",
)
"""Nodes of a graph that move or copy entries, and the log of a softmax, which may follow another.
"""


def length(x: Tensor, order: float = 2) -> Tensor:
    """The norm of all entries, in at least float32, without a copy of x."""
    norm: Tensor = torch.linalg.vector_norm(x, order, dtype=wide(x))
    return norm


def wide(x: Tensor) -> torch.dtype:
    """The dtype of sums: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The length of all tensors together, on their device. If they are sharded, every process must
    call this.
    """
    if not tensors:
        return torch.zeros(())
    dense = []
    for part in tensors:
        if part.is_sparse:
            dense.append(part.coalesce().values())
        else:
            dense.append(part)
    unsharded = [part for part in dense if not hasattr(part, "full_tensor")]
    norms = [part.norm().full_tensor() for part in dense if hasattr(part, "full_tensor")]
    if unsharded:
        norms = [*torch._foreach_norm(unsharded), *norms]
    return length(torch.stack([norm.float() for norm in norms]))


def to_host(tensors: Mapping[Key, Tensor]) -> dict[Key, list[float]]:
    """All numbers on the host, by one transfer from each device."""
    parts = {key: tensor.detach().float().reshape(-1) for key, tensor in tensors.items()}
    values: dict[Key, list[float]] = {}
    for device in {part.device for part in parts.values()}:
        on_device = {key: part for key, part in parts.items() if part.device == device}
        numbers = torch.cat(list(on_device.values())).tolist()
        start = 0
        for key, part in on_device.items():
            end = start + part.numel()
            values[key] = numbers[start:end]
            start = end
    return values


def longest(x: Tensor) -> Tensor:
    """The length of the longest token."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x)).max()
    return norm


def evenness(shares: Tensor) -> Tensor:
    """exp(entropy)/n of n shares: 1 for equal ones, 1/n if one has all."""
    share: Tensor = torch.special.entr(shares).sum().exp() / len(shares)
    return share


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
        tensor = value.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if tensor.numel() == 1:
            return tensor.reshape(()).clone()
        return tensor.float().mean()
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
        if not nodes:
            break
        node = nodes.pop(0)
        if node is None:
            continue
        name = node.name()
        if name.startswith("LogSoftmax") and count == 0:
            nodes = []
            count = 1
        elif name.startswith("Softmax"):
            if count > 0:
                count += 1
        elif count > 0 and not name.startswith(PASSED_OVER):
            continue
        nodes += [before for before, _ in node.next_functions]
    if count == 0:
        return {}
    return {"softmaxes": float(count)}


def host_numbers(values: Sequence[Any]) -> list[float]:
    """The values on the host, in one transfer from a device; nan for None."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor)}
    from_device = to_host(tensors)
    numbers = []
    for i, value in enumerate(values):
        if i in from_device:
            numbers.append(from_device[i][0])
        elif value is None:
            numbers.append(math.nan)
        else:
            numbers.append(float(value))
    return numbers


def largest(pairs: Sequence[tuple[int, float]]) -> float:
    """The largest value of (step, value) pairs; the first inf or nan if there is one."""
    values = [value for _, value in pairs]
    for value in values:
        if not math.isfinite(value):
            return value
    return max(values)


def growth_exponent(added: Sequence[float]) -> float | None:
    """p of |X_k - X_0| ~ k^p by least squares of the logarithms from the middle of the depth to its
    end; None for fewer than two points.
    """
    log_depths = []
    log_lengths = []
    for k in range(max(1, len(added) // 2), len(added) + 1):
        size = added[k - 1]
        if size > 0 and math.isfinite(size):
            log_depths.append(math.log(k))
            log_lengths.append(math.log(size))
    if len(log_depths) < 2:
        return None
    return statistics.linear_regression(log_depths, log_lengths).slope
