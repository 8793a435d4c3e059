"""Edits of how a model computes, made while it runs: its attention, the base of its rotary
positions, a norm before its head.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

EPS = 1e-6
PRODUCT = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The names of the arguments of scaled dot product attention."""


class AttentionInstead(TorchFunctionMode):
    """Changes each softmax over a square of scores, and each scaled dot product attention.

    - `masked`: no token reads a later one
    - `over_keys`: rows sum to 1, whatever axis the model's softmax has
    - `factor`: times the scores
    """

    def __init__(self, *, masked: bool = False, over_keys: bool = False, factor: float = 1.0):
        super().__init__()
        self.masked = masked
        self.over_keys = over_keys
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "softmax":
            return self._softmax(func, list(args), dict(kwargs or {}))
        if name == "scaled_dot_product_attention":
            return func(**self._of_product(_named(PRODUCT, args, kwargs)))
        return func(*args, **(kwargs or {}))

    def _softmax(self, softmax: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        if "input" in kwargs:
            args.insert(0, kwargs.pop("input"))
        scores = args[0]
        if scores.dim() > 2 and scores.shape[-1] == scores.shape[-2] > 1:
            args[0] = scores * self.factor
            if self.masked:
                later = ~_earlier(scores, scores.shape[-1])
                args[0] = args[0].masked_fill(later, -math.inf)
            if self.over_keys and len(args) > 1:
                args[1] = -1
            elif self.over_keys:
                kwargs["dim"] = -1
        rows: Tensor = softmax(*args, **kwargs)
        return rows

    def _of_product(self, given: dict[str, Any]) -> dict[str, Any]:
        query = given["query"]
        length = query.shape[-2]
        given["query"] = query * self.factor
        if not self.masked or length != given["key"].shape[-2] or given.get("is_causal"):
            return given
        mask = given.get("attn_mask")
        earlier = _earlier(query, length)
        if mask is None:
            given["attn_mask"] = earlier
        elif mask.dtype == torch.bool:
            given["attn_mask"] = mask & earlier
        else:
            given["attn_mask"] = mask.masked_fill(~earlier, -math.inf)
        return given


def _named(names: Sequence[str], args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return dict(zip(names, args, strict=False)) | dict(kwargs or {})


def _earlier(like: Tensor, length: int) -> Tensor:
    """Which tokens each token may read: itself and earlier ones."""
    return torch.ones(length, length, dtype=torch.bool, device=like.device).tril()


class OtherRotaryBase(TorchFunctionMode):
    """Changes the angles of which the model takes cosine and sine while it runs, if they are
    t b^(-2i/d) for the positions t, to those of another base b.
    """

    def __init__(self, base: float):
        super().__init__()
        self.base = base

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cos", "sin") and args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                angles = angles_with_base(args[0], self.base)
            if angles is not None:
                args = (angles, *args[1:])
        return func(*args, **(kwargs or {}))


def angles_with_base(angles: Tensor, base: float) -> Tensor | None:
    """Angles t f_i of frequencies f_0 = 1 > f_1 > ..., with those of another base; None for other
    numbers.
    """
    rows = _rows_of(angles)
    if rows is None or bool(rows[0].any()) or not torch.allclose(rows, _times(rows), rtol=1e-3):
        return None
    exponent = _exponent(rows[1], base)
    if exponent is None:
        return None
    return _times(rows, rows[1] ** exponent).view(angles.shape).to(angles)


def table_with_base(table: Tensor, base: float) -> Tensor | None:
    """Frequencies, or a table of their cosines or sines at t = 0, 1, ..., with another base; None
    for another buffer.
    """
    if table.dim() == 1:
        exponent = _exponent(table.double(), base)
        if exponent is None:
            return None
        return (table.double() ** exponent).to(table)
    rows = _rows_of(table)
    if rows is None:
        return None
    for forward, backward in ((torch.cos, torch.acos), (torch.sin, torch.asin)):
        if not torch.equal(rows[0], forward(torch.zeros_like(rows[0]))):
            continue
        frequencies = backward(rows[1].clamp(-1, 1))
        times = torch.arange(len(rows), dtype=torch.float64, device=rows.device)[:, None]
        if not torch.allclose(forward(times[:8] * frequencies), rows[:8], atol=1e-2):
            continue
        exponent = _exponent(frequencies, base)
        if exponent is not None:
            made = forward(times * frequencies**exponent)
            return made.view(table.shape).to(table)
    return None


def _rows_of(table: Tensor) -> Tensor | None:
    """A table (positions, channels) in float64, without further axes of size 1; None if there are
    others.
    """
    squeezed = table.squeeze() if table.dim() > 2 else table
    if squeezed.dim() != 2 or len(squeezed) < 3:
        return None
    return squeezed.double()


def _times(rows: Tensor, frequencies: Tensor | None = None) -> Tensor:
    """t f for the positions t of the rows' number."""
    if frequencies is None:
        frequencies = rows[1]
    times = torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
    return times[:, None] * frequencies


def _exponent(frequencies: Tensor, base: float) -> float | None:
    """The power that takes frequencies b^(-i/n), perhaps repeated, to those of another base; None
    if they are no such ones.
    """
    values = frequencies.unique().flip(0)
    if len(values) < 3 or not bool((values > 0).all()) or abs(float(values[0]) - 1) > 1e-3:
        return None
    steps = values.log().diff()
    if not torch.allclose(steps, steps.mean().expand_as(steps), rtol=1e-2):
        return None
    base_now = float(-steps.mean() * len(values))
    return math.log(base) / base_now


@contextlib.contextmanager
def before_the_head(module: nn.Module, classes: int, norm: str) -> Iterator[None]:
    """Applies a norm without gains to what the head reads: the last part with a row for each
    class.
    """
    heads = [part for part in module.modules() if _has_rows(part, classes)]
    if not heads:
        yield
        return

    def normed(part: nn.Module, args: Any) -> Any:
        x, *others = args
        if norm == "layernorm":
            y = F.layer_norm(x, x.shape[-1:], eps=EPS)
        else:
            y = F.rms_norm(x, x.shape[-1:], eps=EPS)
        return (y, *others)

    handle = heads[-1].register_forward_pre_hook(normed)
    try:
        yield
    finally:
        handle.remove()


def _has_rows(part: nn.Module, classes: int) -> bool:
    """Whether it has a matrix with a row for each class, and is no embedding."""
    weight = getattr(part, "weight", None)
    if isinstance(part, nn.Embedding) or not isinstance(weight, Tensor):
        return False
    return weight.dim() == 2 and len(weight) == classes
