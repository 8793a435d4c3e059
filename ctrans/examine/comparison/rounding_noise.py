"""What rounding explains, measured: a model runs with random changes of the size of its rounding.

Let a result of an operation be rounded to a precision with unit u. The rounded result is
y (1 + u z), |z| <= 1. Inside of `RoundingNoise` every result is changed so, with z uniform in
[-1, 1]. Two programs that compute the same function in other orders differ by about as much as two
such runs. This is stochastic arithmetic (Vignes, 1974), without a change of rounding modes.

A product of matrices is a sum of n products, which is rounded at each addition. Its partial sums
after k of n terms of random signs and size t are about t sqrt(k), so that their roundings add up to
u t n/sqrt(2), in mean square, and not to u times the sum, of size t sqrt(n). Programs add blocks of
some hundred terms, in a register each. So a product moves, besides, by a normal number of the size

    u/sqrt(3) sqrt(min(n, IN_A_ROW)/2) T,    T^2 = sum_k (a_k b_k)^2,

with |a| |b|/sqrt(n) for T, which is its mean square over products of independent factors. A
convolution does with T itself and all its terms in a row. Dtypes of less than 32 bits add up in
float32, and have no such term. Nor have kernels of attention and complex products, whose sums are
not seen here.

Results that are exact, such as copies and views, keep their values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EXACT = frozenset(
    {
        "abs",
        "arange",
        "argmax",
        "bernoulli",
        "bitwise_not",
        "cat",
        "ceil",
        "clone",
        "constant_pad_nd",
        "copy",
        "embedding",
        "empty",
        "empty_like",
        "fill",
        "flip",
        "floor",
        "full",
        "full_like",
        "gather",
        "histc",
        "index",
        "index_select",
        "lift_fresh",
        "masked_fill",
        "max",
        "maximum",
        "min",
        "minimum",
        "neg",
        "new_zeros",
        "ones",
        "ones_like",
        "relu",
        "repeat",
        "roll",
        "round",
        "scalar_tensor",
        "scatter",
        "sign",
        "slice",
        "sort",
        "stack",
        "topk",
        "tril",
        "triu",
        "trunc",
        "where",
        "zeros",
        "zeros_like",
        "zero",
    }
)
"""Operations whose results are entries of their inputs, constants, counts or whole numbers."""


PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
"""Products of matrices, with the places of their two factors."""
IN_A_ROW = 256
"""How many terms a product of matrices adds up one after the other, at most."""
ADDS_IN_FLOAT32 = 1e-6
"""A unit above this one is of a dtype whose products are added up in float32."""


class Draws:
    """Random numbers that are the same in each run, on every device."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, x: Tensor, size: float) -> Tensor:
        """Numbers of the shape and dtype of x, uniform in [-size, size]."""
        drawn = torch.empty_like(x, memory_format=torch.preserve_format)
        return drawn.uniform_(-size, size, generator=self._generator(x.device))

    def normal_like(self, x: Tensor) -> Tensor:
        """Normal numbers of the shape and dtype of x."""
        drawn = torch.empty_like(x, memory_format=torch.preserve_format)
        return drawn.normal_(generator=self._generator(x.device))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]


class RoundingNoise(TorchDispatchMode):
    """Every floating result of an operation is multiplied by 1 + unit z, z uniform in [-1, 1]; of a
    complex one, the two parts.
    """

    def __init__(self, unit: float, draws: Draws):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.unit = unit
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if func.is_view or name in EXACT or not _reads_floats(args):
            return output
        returns = func._schema.returns
        if isinstance(output, Tensor):
            sums: Tensor | None = None
            if output.is_floating_point() and self.unit < ADDS_IN_FLOAT32:
                if name in PRODUCTS:
                    first, second = (args[place] for place in PRODUCTS[name])
                    sums = _sums_of_product(first, second)
                elif name == "convolution":
                    sums = _sums_of_convolution(func, *args)
            return self._noisy(output, sums, written=returns[0].alias_info is not None)
        if isinstance(output, tuple) and name in ROUNDED_FIRST:
            return (self._noisy(output[0], written=False), *output[1:])
        return output

    def _noisy(self, output: Tensor, sums: Tensor | None = None, *, written: bool) -> Tensor:
        """The output with a random change, and with that of its partial sums of this size."""
        if output.is_complex() and not written:
            parts = torch.view_as_real(output.resolve_conj())
            return torch.view_as_complex(self._noisy(parts, written=False))
        if not output.is_floating_point() or output.numel() == 0:
            return output
        change = self.draws.like(output, self.unit).mul_(output)
        if sums is not None:
            of_sums = self.draws.normal_like(output).mul_(sums)
            change.add_(of_sums, alpha=self.unit / math.sqrt(3))
        is_finite = output.isfinite()
        if not bool(is_finite.all()):
            change.masked_fill_(~is_finite, 0)  # hidden scores stay -inf
        if written:
            return output.add_(change)
        return change.add_(output)


def _sums_of_product(first: Tensor, second: Tensor) -> Tensor:
    """sqrt(min(n, IN_A_ROW)/2) T of the product of two matrices, or of two batches of them."""
    terms = first.shape[-1]
    lengths = torch.linalg.vector_norm(first, dim=-1, keepdim=True)
    other_lengths = torch.linalg.vector_norm(second, dim=-2, keepdim=True)
    size: Tensor = lengths * other_lengths * math.sqrt(min(terms, IN_A_ROW) / (2 * max(1, terms)))
    return size


def _sums_of_convolution(
    func: Any, x: Tensor, weight: Tensor, bias: Any, *arguments: Any
) -> Tensor:
    """sqrt(n/2) T of a convolution with these arguments."""
    terms = weight[0].numel()
    squares: Tensor = func(x.square(), weight.square(), None, *arguments)
    return squares.clamp(min=0).sqrt() * math.sqrt(terms / 2)


def _reads_floats(args: Any) -> bool:
    """Whether an input has numbers that may be rounded: ids, positions and counts are exact."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    return any(x.is_floating_point() or x.is_complex() for x in tensors)


ROUNDED_FIRST = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "native_batch_norm",
        "native_group_norm",
        "native_layer_norm",
        "nll_loss2d_forward",
        "nll_loss_forward",
        "_fused_rms_norm",
        "_native_multi_head_attention",
    }
)
"""Operations whose first result is the output, and whose others are for their derivatives."""


@contextlib.contextmanager
def changed_by(changes: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Inside, the parameters have these changes added to them. Afterwards they are what they were,
    to the bit. The changes are overwritten, which saves a copy of each weight.
    """
    before = {parameter: parameter.data for parameter in changes}
    try:
        for parameter, change in changes.items():
            parameter.data = change.to(parameter.dtype).add_(parameter.data)
        yield
    finally:
        for parameter, data in before.items():
            parameter.data = data
