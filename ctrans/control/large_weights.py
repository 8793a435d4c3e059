"""Whether a verdict at the present weights also holds at large ones, by what the model computes
with them.

An infinite H claims that the output of a map grows with its weights, and a finite one that a norm
stays bounded. Code that ctrans does not read, such as a hook, may break either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ctrans.control.shown_factors import Factors
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.sublayer import Sublayer

WEIGHTS = {torch.float64: (1e8, 1e16), torch.float32: (1e4, 1e8)}
"""Two sizes of weights between which the output of a map must grow."""
INPUTS = {torch.float64: (1e14, 1e20), torch.float32: (1e8, 1e14)}
"""Two sizes of inputs between which the output of a norm must not grow."""
GROWTH = 10.0
"""The least growth; one factor alone grows by the ratio of the sizes."""
SAME = 1.01
"""The most that a bounded output may grow, by rounding."""
ROWS = 16
"""Random rows that a norm gets."""
NORM_GROWS = "its norm does not bound large inputs, so that its output grows with its weights"


def grows(run: Callable[[], Tensor], matrices: Sequence[Tensor]) -> bool:
    """Whether |run()| grows with the size of random matrices. They are put back to the bit.

    Numbers that overflow count as growth.
    """
    kept = [matrix.detach().clone() for matrix in matrices]
    lengths = []
    try:
        for size in WEIGHTS[_precision(matrices)]:
            generator = torch.Generator().manual_seed(0)
            for matrix in matrices:
                drawn = torch.randn(matrix.shape, generator=generator, dtype=torch.float64)
                matrix.data.copy_(size * drawn)
            lengths.append(float(run().double().norm()))
    finally:
        for matrix, before in zip(matrices, kept, strict=True):
            matrix.data.copy_(before)
    smaller, larger = lengths
    return not larger <= GROWTH * smaller


def stays_bounded(norm: Norm, like: Tensor) -> bool:
    """Whether the norm's output is no larger for larger inputs. Numbers that overflow say
    nothing.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, norm.width, generator=generator, dtype=torch.float64).to(like)
    offset = norm.beta.detach()
    smaller, larger = (
        (norm(size * rows).detach() - offset).abs().amax() for size in INPUTS[_precision([like])]
    )
    return not bool(larger > SAME * smaller) or not bool(larger.isfinite())


def norms_stay_bounded(sublayer: Sublayer, like: Tensor) -> bool:
    """Whether the norms behind a map or around its state stay bounded."""
    norms = (sublayer.output_norm, sublayer.state_norm)
    return all(norm is None or stays_bounded(norm, like) for norm in norms)


@torch.no_grad()
def own_factors(depth: Depth, states: Sequence[Tensor]) -> Factors:
    """The test of each sublayer with a hook or a parametrisation, at the states before each
    segment. Others compute what their classes say.
    """
    unlike: dict[int, str] = {}
    bounded: set[int] = set()
    otherwise: dict[int, str] = {}
    for k, (sublayer, state) in enumerate(zip(depth.sublayers, states, strict=True)):
        part = next(_altered(sublayer), "")
        if not part:
            continue
        unlike[k] = f"{part} has a hook or a parametrisation, which may limit what it computes"
        matrices = [weight for weight in sublayer.field.parameters() if weight.dim() > 1]
        given = sublayer.given(sublayer.enter(state))
        if matrices and not grows(partial(sublayer.field, given), matrices):
            bounded.add(k)
        if not norms_stay_bounded(sublayer, state):
            otherwise[k] = NORM_GROWS
    return Factors(unlike, frozenset(bounded), otherwise=otherwise)


def _altered(sublayer: Sublayer) -> Iterator[str]:
    """The names of parts with a hook, a parametrisation, or a forward of their own."""
    for name, part in sublayer.named_modules():
        hooks = part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
        if hooks or parametrize.is_parametrized(part):
            yield name or type(sublayer).__name__


def _precision(tensors: Sequence[Tensor]) -> torch.dtype:
    if all(tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32


def matrices_of(sublayer: Sublayer, block: nn.Module) -> list[nn.Parameter]:
    """The matrices of a block that a sublayer's map uses; all of the block if it shows none."""
    of_map = {id(parameter) for parameter in sublayer.field.parameters()}
    matrices = [parameter for parameter in block.parameters() if parameter.dim() > 1]
    return [matrix for matrix in matrices if id(matrix) in of_map] or matrices
