"""Whether a verdict at the present weights also holds at large ones, by what the model computes
with them.

An infinite H claims that the output of a map grows with its weights, and a finite one that a norm
stays bounded. Code that ctrans does not read, such as a hook, may break either.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ctrans.control.attention_averages import NO_AVERAGES, row_error, why_no_averages
from ctrans.control.decay_paths import ValuePath
from ctrans.control.shown_factors import Factors, largest_share, path_of, shown_velocity
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import ExposesHeads
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.on_demand import OnDemand
from solvers import ConfigError

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
LARGE = 1e6
"""The size of the matrices at which a map is compared with its factors."""
CLOSE = 1e-3
"""How closely the two must agree, as a share."""
NORM_GROWS = "its norm does not bound large inputs, so that its output grows with its weights"
PASSES_BY = "its output grows with its weights although it has a norm: something passes the norm by"
OVERFLOWS = "numbers overflow in it at large weights, so whether its output grows is not known"
HOOKED = "it has a hook or a forward of its own, whose weights are not known"
NO_MATRICES = "it has no matrices of numbers that could be made large, so no verdict was tested"
PLAIN = (nn.Linear, nn.Identity, nn.Dropout, nn.ModuleList, nn.ModuleDict)
"""Classes of torch that the maps of ctrans consist of."""


def grows(run: Callable[[], Tensor], matrices: Sequence[Tensor]) -> bool | None:
    """Whether |run()| grows with the size of random matrices; None if numbers overflow. The
    matrices are put back to the bit.
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
    if not (math.isfinite(smaller) and math.isfinite(larger)):
        return None
    return larger > GROWTH * smaller


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


@dataclass(frozen=True)
class AtLargeWeights:
    """What a sublayer does at large weights.

    - `bounded`: whether the output of its map stays bounded
    - `otherwise`: why a finite H is not its own; "" if nothing speaks against it
    - `untested`: why nothing is known; "" if something is
    """

    bounded: bool = False
    otherwise: str = ""
    untested: str = ""


def at_large_weights(
    sublayer: Sublayer,
    state: Tensor,
    moved: Callable[[], Tensor],
    matrices: Sequence[Tensor],
    *,
    is_plain: bool,
) -> AtLargeWeights:
    """What a sublayer does with large matrices at a state. `moved` is what the model's own code
    adds to that state. Plain code grows as its maps do.
    """
    if not matrices:
        return AtLargeWeights(untested=NO_MATRICES)
    has_norm = sublayer.output_norm is not None or sublayer.state_norm is not None
    is_bounded_by_norm = has_norm or sublayer.image is not None
    if not is_bounded_by_norm:
        growth = True if is_plain else grows(moved, matrices)
        if growth is None:
            return AtLargeWeights(untested=OVERFLOWS)
        return AtLargeWeights(bounded=not growth)
    if not norms_stay_bounded(sublayer, state):
        return AtLargeWeights(otherwise=NORM_GROWS)
    growth = grows(moved, matrices)
    if growth is None:
        return AtLargeWeights(untested=OVERFLOWS)
    if growth:
        return AtLargeWeights(otherwise=PASSES_BY)
    bounded = False
    if sublayer.state_norm is not None and not is_plain:
        # the ODE has no norm behind the map
        given = sublayer.given(sublayer.enter(state))
        bounded = grows(partial(sublayer.field, given), matrices) is False
    return AtLargeWeights(bounded=bounded)


def factors_at(
    tests: dict[int, AtLargeWeights], unlike: dict[int, str], further: Iterable[int]
) -> Factors:
    """What the tests of all segments found."""
    return Factors(
        unlike,
        bounded=frozenset(k for k, test in tests.items() if test.bounded),
        further=frozenset(further),
        otherwise={k: test.otherwise for k, test in tests.items() if test.otherwise},
        untested={k: test.untested for k, test in tests.items() if test.untested},
    )


@torch.no_grad()
def own_factors(depth: Depth, states: Sequence[Tensor]) -> Factors:
    """The test of each sublayer with a hook, a parametrisation or a part of another class, at the
    states before each segment. Others compute what their classes say.
    """
    unlike: dict[int, str] = {}
    further: set[int] = set()
    tests: dict[int, AtLargeWeights] = {}
    missed: dict[int, float] = {}
    for k, (sublayer, state) in enumerate(zip(depth.sublayers, states, strict=True)):
        altered = next(_altered(sublayer), None)
        foreign = next(_foreign(sublayer), "")
        if altered is None and not foreign:
            continue
        entered = sublayer.enter(state)
        try:
            if altered is not None:
                unlike[k] = (
                    f"{altered or 'the sublayer'} has a hook or a parametrisation, which may limit"
                    " what it computes"
                )
            else:
                reason, missed[k] = _why_unlike(sublayer, entered)
                if reason:
                    unlike[k] = f"{foreign} is no class of ctrans or torch: {reason}"
                if _has_gains(sublayer):
                    further.add(k)
            tests[k] = at_large_weights(
                sublayer,
                entered,
                partial(moved_by, sublayer, entered, depth.lengths[k]),
                [weight for weight in sublayer.parameters() if weight.dim() > 1],
                is_plain=False,
            )
            if altered is not None and not parametrize.is_parametrized(
                sublayer.get_submodule(altered)
            ):
                tests[k] = replace(tests[k], otherwise=tests[k].otherwise or HOOKED)
        except Exception as error:  # a part of another's code raises what it likes
            reason = f"it does not run with large weights ({type(error).__name__}: {error})"
            unlike.setdefault(k, reason)
            tests[k] = AtLargeWeights(untested=reason)
    return replace(factors_at(tests, unlike, further), missed=missed)


def moved_by(sublayer: Sublayer, x: Tensor, dt: float) -> Tensor:
    """What a sublayer adds to a state that has entered its segment."""
    moved: Tensor = sublayer.moved(x, sublayer(x), dt) - x
    return moved


def _altered(sublayer: Sublayer) -> Iterator[str]:
    """The names of parts with a hook, a parametrisation, or a forward of their own."""
    for name, part in sublayer.named_modules():
        if _has_hook(part) or parametrize.is_parametrized(part):
            yield name


def _has_hook(part: nn.Module) -> bool:
    """Whether the part has a hook, or a forward of its own."""
    return bool(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))


def _foreign(sublayer: Sublayer) -> Iterator[str]:
    """The names of parts whose class is neither of ctrans nor a plain one of torch."""
    for name, part in sublayer.named_modules():
        kind = type(part)
        if kind not in PLAIN and not kind.__module__.startswith("ctrans."):
            yield f"{name or 'the sublayer'} ({kind.__name__})"


def _has_gains(sublayer: Sublayer) -> bool:
    """Whether the map has vectors or numbers that are not the biases of linear maps."""
    biases = {id(bias) for bias in _biases(sublayer.field)}
    return any(
        weight.dim() < 2 and id(weight) not in biases for weight in sublayer.field.parameters()
    )


def _biases(field: nn.Module) -> Iterator[Tensor]:
    """The biases of linear maps whose class adds them. What others call a bias may be a factor."""
    for part in field.modules():
        is_own = type(part) is nn.Linear or type(part).__module__.startswith("ctrans.")
        if isinstance(part, nn.Linear) and is_own and part.bias is not None:
            yield part.bias


def _why_unlike(sublayer: Sublayer, entered: Tensor) -> tuple[str, float]:
    """Why the map does not compute with large matrices what its path of two factors does; "" if it
    does, or shows no path. Also how closely it was seen to do so.
    """
    field: Any = sublayer.field
    of_field = {id(weight) for weight in field.parameters()}
    for name, weight in sublayer.named_parameters():
        if weight.dim() > 1 and id(weight) not in of_field:
            return f"{name} is a matrix outside of the map, and may be one more factor", 0.0
    given = sublayer.given(entered)
    try:
        path = path_of(field, given)
    except ConfigError:
        return "", 0.0
    missed = 0.0
    if isinstance(field, ExposesHeads):
        missed = row_error(field, given)
        if not missed <= CLOSE:
            return NO_AVERAGES, missed
    for is_spiky in (False, True):
        with _large(field, is_spiky=is_spiky, size=LARGE):
            shown = shown_velocity(field, given)
            found = field(given).flatten(0, -2)
            if shown is None:
                return "its map shows no matrices by which its factors could be tested", missed
            missed = max(missed, largest_share(found - shown, shown))
            if not missed <= CLOSE:
                return "with large weights it computes something else than its factors show", missed
            if isinstance(field, ExposesHeads):
                missed = max(missed, row_error(field, given))
            if not missed <= CLOSE:
                return NO_AVERAGES, missed
    if isinstance(field, ExposesHeads) and isinstance(path, ValuePath):
        with _large(sublayer.field, is_spiky=False, size=1.0, bias=0.0):
            reason, error = why_no_averages(field, path, given, CLOSE)
        return reason, max(missed, error)
    return "", missed


@contextlib.contextmanager
def _large(field: nn.Module, *, is_spiky: bool, size: float, bias: float = 1.0) -> Iterator[None]:
    """Inside, the matrices of a map are random of a size, and so are the biases of its linear maps.
    With `is_spiky` matrices have rank 1.

    Next to large matrices biases that are only added do not show. A vector that a map calls a
    bias, and that scales what the matrices make, does. Vectors that end in "bias" and are of no
    linear map get a random part for that reason.
    """
    kept = [(weight.data, weight.data.clone()) for weight in field.parameters()]
    generator = torch.Generator().manual_seed(0)
    biases = {id(vector) for vector in _biases(field)}

    def random_like(weight: Tensor) -> Tensor:
        return torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)

    try:
        for name, weight in field.named_parameters():
            drawn = random_like(weight.data)
            if weight.dim() > 1:
                if is_spiky:
                    drawn = drawn[:, :1] * drawn[:1]
                weight.data.copy_(size * drawn)
            elif id(weight) in biases:
                weight.data.copy_(bias * drawn)
            elif name.endswith("bias"):
                weight.data.add_(bias * drawn)
        yield
    finally:
        for tensor, before in kept:
            tensor.copy_(before)


def _precision(tensors: Sequence[Tensor]) -> torch.dtype:
    if all(tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32


def matrices_of(sublayer: Sublayer, block: nn.Module) -> Sequence[Tensor]:
    """The matrices of a block that a sublayer's map uses; all of the block if it shows none."""
    on_demand = _on_demand(sublayer.field) or _on_demand(block)
    if on_demand:
        return on_demand
    of_map = {id(parameter) for parameter in sublayer.field.parameters()}
    matrices = [parameter for parameter in block.parameters() if parameter.dim() > 1]
    return [matrix for matrix in matrices if id(matrix) in of_map] or matrices


def _on_demand(module: nn.Module) -> list[Tensor]:
    """The matrices on demand of a module, as the shelf holds them now."""
    weights = [
        part.place.weight(name)
        for part in module.modules()
        if isinstance(part, OnDemand)
        for name in part.place.names
    ]
    return [weight for weight in weights if weight.is_floating_point() and weight.dim() > 1]
