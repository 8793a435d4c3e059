"""Leading singular values of a function's Jacobian, from products with it. No matrix is formed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.option import POSITIVE
from ctrans.dynamics.depth import check_count
from solvers import ConfigError, Map

Input = Float[Tensor, "*input"]
"""A tensor of the shape of the input."""

CYCLE = 32
"""Default number of Krylov vectors before a restart. For a state of 256 tokens by 768 they take 50
MB in float32.
"""
LIMIT = 200
"""Default limit on products with J and J'. At the limit the iteration stops, and the error estimate
says how accurate the values are.
"""
FEWEST = 10
"""Products, beyond the number of wanted values, before the error estimate counts. A space without
the leading vector can look converged to another value. In 600 small random cases 4 products gave
1.5% wrong values, by up to 7%; 8 products gave none.
"""
LAG = 8
"""Number of products over which the growth of the values is measured. A plateau at a close second
value can last for 4.
"""
GUESS = 0.3
"""Length of the random vector that is added to a guess of length 1."""
SAFETY = 4.0
"""Reported errors are this factor times the estimate that ends the iteration. Where values crowd
without a gap, a start vector may have almost no component along the largest one. In 2 of 100 cases
(linear, quadratic, root and logarithmic spectra of 50 to 2000 values, Gaussian matrices) the true
error was larger than the estimate, by up to 4.1 times. A residual cannot detect a component that
the start vector lacks. The a priori bound is too loose to stop by: with probability 1 - p over
starts in n dimensions the error e after m products satisfies e T_m-1(1 + 2e)^2 = 2n/(pi p^2)
(Kaniel, Saad), which is 1% at m = 31, n = 200, p = 0.02.
"""
CLUSTER = 4
"""The error estimate treats up to this many values after a wanted one as a cluster with it."""


@dataclass(frozen=True, eq=False)
class Linearisation:
    """y = function(x) with the products `push`: v -> J v and `pull`: u -> J' u at that x. Each
    product costs about one evaluation.
    """

    x: Input
    y: Float[Tensor, "*output"]
    push: Map
    pull: Map


@torch.enable_grad()
def linearise(function: Map, x: Input) -> Linearisation:
    """The function's Jacobian at x, as products (`jacobian_products`).

    The function must have second derivatives. Fused attention has none: see
    `ctrans.dynamics.fields.reference_kernels`.
    """
    x = x.detach().requires_grad_()
    y = function(x)
    if not y.requires_grad:  # J = 0 where the function does not depend on x
        y = y + 0.0 * x.sum()
    push, pull = jacobian_products(y, [x])
    return Linearisation(x.detach(), y.detach(), lambda v: push([v]), lambda u: pull(u)[0])


@torch.enable_grad()
def jacobian_products(
    y: Tensor, inputs: Sequence[Tensor]
) -> tuple[Callable[[Sequence[Tensor]], Tensor], Callable[[Tensor], tuple[Tensor, ...]]]:
    """v -> J v and u -> J' u for the Jacobian of y by its inputs, with one vector for each input.

    J v is the derivative of the linear map u -> J' u, so two graphs, built once, serve all
    products.
    """
    u = torch.zeros_like(y, requires_grad=True)
    pulled = torch.autograd.grad(y, inputs, u, create_graph=True, materialize_grads=True)

    def push(along: Sequence[Tensor]) -> Tensor:
        used = [(p, v) for p, v in zip(pulled, along, strict=True) if p.requires_grad]
        if not used:
            return torch.zeros_like(y)
        with second_derivatives():
            linked, vectors = zip(*used, strict=True)
            return torch.autograd.grad(
                linked, u, vectors, retain_graph=True, materialize_grads=True
            )[0]

    def pull(w: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, inputs, w, retain_graph=True, materialize_grads=True)

    return push, pull


@contextlib.contextmanager
def second_derivatives() -> Iterator[None]:
    """Raises ConfigError, with the kernel's name, where a kernel inside has no second
    derivatives.
    """
    try:
        yield
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        raise ConfigError(
            "a map has no second derivatives, which its Jacobian needs"
            f" ({str(error).splitlines()[0]}): give a fused attention a second path that it takes"
            " where its attribute `use_reference_kernel` is true (`HasReferenceKernel`)"
        ) from None


def compose(parts: Sequence[Linearisation]) -> Linearisation:
    """The linearisation of the parts one after another: J = J_last ... J_first."""

    def push(v: Tensor) -> Tensor:
        for part in parts:
            v = part.push(v)
        return v

    def pull(u: Tensor) -> Tensor:
        for part in reversed(parts):
            u = part.pull(u)
        return u

    return Linearisation(parts[0].x, parts[-1].y, push, pull)


@dataclass(frozen=True, eq=False)
class Singular:
    """Leading singular triplets J v = sigma u of each problem in a batch, largest first.

    `errors` estimate how far each value is below the true one, from the residual J'u - sigma v.
    Values are Ritz values, so they exceed the true ones by rounding only. `products` counts pairs
    of J v and J' u. Values are nan where J is not finite.
    """

    values: Float[Tensor, "*batch count"]
    errors: Float[Tensor, "*batch count"]
    right: Float[Tensor, "..."]
    products: int

    @property
    def largest(self) -> float:
        """|J|_2 of the whole batch."""
        return float(self.values.max())

    @property
    def error(self) -> float:
        """Estimated relative error of `largest`, which may be too small."""
        gap = float((self.values + self.errors).max()) - self.largest
        if self.largest:
            return gap / self.largest
        return gap


def first_of(parts: Sequence[Singular], count: int) -> Singular | None:
    """The triplets of the first `count` problems of several batches, in order. None if there are
    fewer.
    """
    if sum(len(part.values) for part in parts) < count:
        return None
    return Singular(
        torch.cat([part.values for part in parts])[:count],
        torch.cat([part.errors for part in parts])[:count],
        torch.cat([part.right for part in parts])[:count],
        max(part.products for part in parts),
    )


@torch.no_grad()
def leading_singular(
    linear: Linearisation,
    *,
    problem: int = 2,
    count: int = 1,
    each: bool = False,
    tolerance: float = 1e-3,
    start: Input | None = None,
    generator: torch.Generator | None = None,
    cycle: int = CYCLE,
    limit: int = LIMIT,
) -> Singular:
    """sigma_1 >= ... >= sigma_count of J, by Rayleigh-Ritz on a Krylov space of J'J with thick
    restarts.

    - `linear`: J, as products with it and its transpose
    - `problem`: number of trailing axes of the linearisation's x that belong to one Jacobian; the
      axes before them are a batch of independent problems
    - `count`: number of wanted values; repeated values count as often as they occur
    - `each`, `tolerance`: the iteration stops when the estimated relative error is at most
      `tolerance`, for the largest value of the batch, or with `each` for all wanted values of each
      problem
    - `start`: a guess of the first right singular vectors; `generator` draws one if it is None
    - `cycle`, `limit`: number of vectors before a restart, and largest number of products

    The square of a value is a Ritz value of J'J. Its error estimate is the minimum over j of
    |residuals of this and the next j Ritz values|^2 divided by the distance to the Ritz value after
    them, and at most its own residual. That distance uses Ritz values in place of the unknown
    eigenvalues, which misleads where values crowd together. The recent growth of the values
    replaces the estimate if it is larger. Reported errors are `SAFETY` times the estimate. They
    covered the true error in 99% of the spectra tested, but they are no bound.

    Raises ConfigError if count or limit is below 1, cycle is below count + 2, or tolerance is not
    positive and finite.
    """
    check_count("count", count)
    check_count("limit", limit)
    if cycle < count + 2:
        raise ConfigError(
            f"cycle = {cycle} is too small for {count} wanted vectors: give at least {count + 2}"
        )
    POSITIVE.check("tolerance", float(tolerance), hint=", such as 1e-3")
    shape = linear.x.shape
    batch = shape[: len(shape) - problem]
    inner = shape[len(shape) - problem :]
    flat = (math.prod(batch), math.prod(inner))
    count = min(count, flat[1])
    capacity = min(cycle, flat[1])

    def gram(v: Tensor) -> Tensor:
        return linear.pull(linear.push(v.reshape(shape))).reshape(flat)

    space = _Space(gram, linear.x.new_zeros(flat[0], capacity, flat[1]), count)
    for guess in _starts(linear.x.reshape(flat), count, start, generator):
        space.extend(guess)
    while space.products < limit and not (
        space.products >= min(count + FEWEST, capacity)
        and space.converged(tolerance, all_values=each)
    ):
        space.extend(space.direction(tolerance))
    return Singular(
        space.values.reshape(*batch, count).to(linear.x.dtype),
        (SAFETY * space.errors).reshape(*batch, count).to(linear.x.dtype),
        space.vectors[:, :count].reshape(*batch, count, *inner),
        space.products,
    )


def _starts(
    like: Tensor, count: int, start: Tensor | None, generator: torch.Generator | None
) -> list[Tensor]:
    """Random directions. The first is mixed with the guess, because the guess alone may be
    orthogonal to a larger value's vector.
    """
    generator = generator or torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
        for _ in range(count)
    ]
    if start is not None:
        drawn[0] = unit(start.reshape(like.shape)) + GUESS * unit(drawn[0])
    return drawn


class _Space:
    """An orthonormal basis V of a subspace, A V for A = J'J, and the Ritz values and vectors of A
    in it.
    """

    def __init__(self, gram: Map, basis: Tensor, count: int):
        self.gram = gram
        self.basis = basis
        self.count = count
        self.image = torch.zeros_like(basis)
        self.size = 0
        self.products = 0
        self.history: list[Tensor] = []
        self.bad = torch.zeros(basis.shape[0], dtype=torch.bool, device=basis.device)

    def extend(self, candidate: Tensor) -> None:
        """Adds the candidate's part orthogonal to the basis. A full basis is first cut to its best
        Ritz vectors.
        """
        if self.size == self.basis.shape[1]:
            self._restart()
        old = self.basis[:, : self.size]
        v = unit(candidate)
        for _ in range(2):
            v = unit(v - ((old @ v.unsqueeze(-1)).mT @ old).squeeze(-2))
        image = self.gram(v)
        self.products += 1
        self.bad |= ~torch.isfinite(image).all(-1)
        keep = ~self.bad.unsqueeze(-1)
        self.basis[:, self.size] = v
        self.image[:, self.size] = torch.where(keep, image, 0.0)
        self.size += 1
        self._solve()

    def direction(self, tolerance: float) -> Tensor:
        """The residual of each problem's first wanted Ritz vector that is not good enough."""
        poor = self.errors > tolerance * self.values
        worst: Tensor = self.residuals[
            torch.arange(len(poor), device=poor.device), poor.int().argmax(-1)
        ]
        return worst

    def converged(self, tolerance: float, *, all_values: bool) -> bool:
        values = self.values[~self.bad]
        errors = self.errors[~self.bad]
        if not values.numel():
            return True
        if all_values:
            resolved = torch.finfo(self.basis.dtype).eps ** 0.5 * values[:, :1]
            return bool((errors <= tolerance * values + resolved).all())
        top = values.max()
        return bool((values + errors).max() - top <= tolerance * top)

    def _solve(self) -> None:
        """Computes Ritz pairs, the residuals A y - lambda y of the leading ones, and the error
        estimates of sqrt(lambda).
        """
        basis = self.basis[:, : self.size]
        image = self.image[:, : self.size]
        projected = (basis @ image.mT).double()
        symmetric = projected / 2 + projected.mT / 2
        # finite images may have products that overflow
        overflows = ~torch.isfinite(symmetric).all(-1).all(-1)
        self.bad |= overflows
        self.image[overflows] = 0.0
        symmetric[overflows] = 0.0
        ascending, rotation = torch.linalg.eigh(symmetric)
        self._ritz_values = ascending.flip(-1).clamp(min=0)
        self._rotation = rotation.flip(-1).to(basis.dtype)
        first = self._rotation[..., : self.count + CLUSTER].mT
        self.vectors = first @ basis
        self.residuals = (
            first @ image
            - self._ritz_values[:, : first.shape[1], None].to(basis.dtype) * self.vectors
        )
        leading = self._ritz_values[:, : self.count]
        shift = _shift(self._ritz_values, length(self.residuals).squeeze(-1), self.count)
        unknown = torch.where(self.bad.unsqueeze(-1), torch.nan, 0.0)
        self.values = leading.sqrt() + unknown
        self.errors = (
            torch.maximum((leading + shift).sqrt() - leading.sqrt(), self._trend()) + unknown
        )

    def _trend(self) -> Tensor:
        """(m/2) d value/dm after m products: the remaining growth if values grow like s - c/m^2, as
        at a spectral edge without a gap.
        """
        self.history = [*self.history[-LAG:], self.values]
        before = self.history[0]
        if (
            self.size == self.basis.shape[2]
            or len(self.history) <= LAG
            or before.shape != self.values.shape
        ):
            return torch.zeros_like(self.values)
        grown: Tensor = (self.values - before).clamp(min=0)
        return grown * (self.products / 2 / LAG)

    def _restart(self) -> None:
        keep = max(self.basis.shape[1] // 2, self.count)
        rotation = self._rotation[..., :keep].mT
        self.basis[:, :keep] = rotation @ self.basis
        self.image[:, :keep] = rotation @ self.image
        self.size = keep


def _shift(ritz_values: Tensor, residuals: Tensor, count: int) -> Tensor:
    """How far the first `count` Ritz values may be below the eigenvalues, as in
    `leading_singular`.
    """
    after = torch.nn.functional.pad(
        ritz_values, (0, 1)
    )  # after the last Ritz value only A >= 0 is known
    shifts = []
    for i in range(min(count, ritz_values.shape[1])):
        cluster = residuals[:, i : i + CLUSTER].square().cumsum(-1)
        gaps = ritz_values[:, i : i + 1] - after[:, i + 1 : i + 1 + cluster.shape[1]]
        shifts.append(
            torch.minimum(
                (cluster / gaps.clamp(min=torch.finfo(gaps.dtype).tiny)).amin(-1), residuals[:, i]
            )
        )
    return torch.stack(shifts, -1)


def length(v: Tensor) -> Tensor:
    """|v| along the last axis, kept, in float64. Where the squares overflow or vanish, it is
    computed from v over its largest entry.
    """
    direct = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    over_largest, largest = _over_largest(v)
    scaled = largest.double() * torch.linalg.vector_norm(over_largest, dim=-1, keepdim=True)
    return torch.where(_holds(direct), direct.double(), scaled)


def unit(v: Tensor) -> Tensor:
    """v / |v| along the last axis; 0 where v is 0."""
    direct = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    holds = _holds(direct)
    over_largest, _ = _over_largest(v)
    vector = torch.where(holds, v, over_largest)
    size = torch.where(holds, direct, torch.linalg.vector_norm(vector, dim=-1, keepdim=True))
    return vector / torch.where(size == 0, 1.0, size)


def _holds(length: Tensor) -> Tensor:
    """Whether a length that was computed from squares is right: none overflowed, and those that
    vanished are below eps^2 of their sum.
    """
    numbers = torch.finfo(length.dtype)
    return (length > math.sqrt(numbers.tiny) / numbers.eps) & length.isfinite()


def _over_largest(v: Tensor) -> tuple[Tensor, Tensor]:
    """v over its largest |entry|, and this entry; v itself if it is 0."""
    largest = v.abs().amax(-1, keepdim=True)
    return v / torch.where(largest == 0, 1.0, largest), largest
