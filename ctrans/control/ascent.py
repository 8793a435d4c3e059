"""Gradient ascent in free coordinates of a set of velocities.

It certifies a supremum without its formula: it evaluates the model's modules and follows autograd's
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import AnyShape, UnbatchedRows

Map = Callable[[Tensor], Tensor]

STEPS = 1000
SHARE = 0.5
"""The least step, relative to |z|, where the payoff is not concave: half a radian for a scale-free
problem.
"""
SMALL = 1e-3
"""Payoffs below this share of the mean are judged as if they were this share. Lengths are compared
with the longest in the same way.
"""
NOISE = 32
"""Payoffs within so many machine epsilons count as equal."""


def identity(z: Tensor) -> Tensor:
    """Returns z."""
    return z


def frobenius(x: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch 1 1"]:
    """|X|_F of each matrix, with its axes kept."""
    size: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return size


def noise(like: Tensor, generator: torch.Generator, *shape: int) -> Tensor:
    """Entries N(0, 1) in the dtype and on the device of `like`, the same on every device."""
    return torch.randn(shape, generator=generator, dtype=like.dtype).to(like.device)


def free(z: Tensor, f: Tensor) -> float:
    """No running cost."""
    return 0.0


@dataclass(frozen=True, eq=False)
class Gains:
    """A norm's present gains and offsets, whether the offsets are trained, and the velocity of a
    raw output under other gains and offsets.

    A gain that all channels share is one number.
    """

    gamma: Float[Tensor, " gains"]
    beta: Float[Tensor, " gains"]
    has_offset: bool
    velocity: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Chart:
    """Maximise -<P, f> - cost(z, f) over z, f = velocity(z). Problems stand side by side; `axes`
    are those of one problem in z.

    - `shape`: that of z, without leading axes for several starts
    - `degree`: k in velocity(c z) ~ c^k velocity(z) for large c where z is a sublayer's raw output;
      None where it is not
    - `project`: returns coordinates to the allowed ones
    - `spread`: the standard deviation of random starts
    - `raw`: the inverse of `velocity`: a raw output with the velocity f, so large that eps does not
      matter
    - `gains`: those of the norm that makes the velocity, if there is one
    - `guess`: makes starts of rows of random numbers, shape (guesses, 1, width), for payoffs with
      local maxima
    - `joint`: whether gains couple all tokens to one problem
    - `parts`: into how many problems of consecutive entries the problem of one token splits
    """

    P: Float[Tensor, " tokens *entries"]
    shape: tuple[int, ...]
    velocity: Map
    axes: tuple[int, ...] = (-1,)
    degree: int | None = None
    cost: Callable[[Tensor, Tensor], Tensor | float] = free
    project: Map = identity
    spread: float = 1.0
    raw: Map = identity
    gains: Gains | None = None
    guess: Map | None = None
    joint: bool = False
    parts: int = 1

    def payoff(self, z: Float[Tensor, "*starts rows columns"]) -> Float[Tensor, "*problems"]:
        """-<P, f> - cost of each problem: at most its part of H."""
        f = self.velocity(z)
        return -(self.P * f).sum(self.axes) - self.cost(z, f)

    def split_parts(self) -> Chart:
        """The same problems in z of shape (*starts, tokens, parts, entries); itself if there is one
        part.
        """
        if self.parts == 1:
            return self
        velocity = self.velocity
        project = self.project

        def split(x: Tensor) -> Tensor:
            parts: Tensor = x.unflatten(-1, (self.parts, -1))
            return parts

        return replace(
            self,
            P=split(self.P),
            shape=(*self.shape[:-1], self.parts, self.shape[-1] // self.parts),
            velocity=lambda z: split(velocity(z.flatten(-2))),
            project=lambda z: split(project(z.flatten(-2))),
            parts=1,
        )


@dataclass(frozen=True, eq=False)
class Ascent:
    """The best payoff found for each problem, its coordinates z, and the number of steps of the
    slowest problem.
    """

    best: Float[Tensor, "*problems"]
    z: AnyShape
    steps: int


def ascend(
    payoff: Map, start: AnyShape, axes: tuple[int, ...], project: Map = identity, steps: int = STEPS
) -> Ascent:
    """z <- project(z + eta grad payoff(z)), with the step eta of Barzilai and Borwein (1988) for
    each problem.

    A problem stops when |z| times the projected gradient is below sqrt(eps) of its payoff. The
    payoff is flat at a maximum, so it is then exact to rounding.
    """

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(axes, keepdim=True)

    eps = torch.finfo(start.dtype).eps
    z = project(start.detach())
    best_z = z
    best, gradient = _slope(payoff, z)
    move = torch.zeros_like(z)
    fall = move
    eta = torch.zeros_like(inner(z, z))
    step = 0
    while step < steps:
        size = inner(z, z).sqrt()
        slope = inner(gradient, gradient).sqrt()
        unit = size / torch.where(slope == 0, 1.0, slope)
        probe = project(z + unit * gradient) - z
        scale = torch.maximum(best.abs(), SMALL * best.abs().mean()).reshape(size.shape)
        active = inner(probe, probe).sqrt() * slope > eps**0.5 * scale
        if not active.any():
            break
        curvature = inner(move, fall)
        if step % 2 == 1:
            secant = inner(move, move) / curvature
        else:
            secant = curvature / inner(fall, fall)
        eta = torch.where(curvature > 0, secant, torch.maximum(2 * eta, SHARE * unit))
        move = torch.where(active, project(z + eta * gradient) - z, 0.0)
        z = z + move
        values, uphill = _slope(payoff, z)
        fall = gradient - uphill
        gradient = uphill
        # of payoffs that are equal to rounding, the later one has converged further
        later = values >= best - NOISE * eps * best.abs()
        best_z = torch.where(later.reshape(size.shape), z, best_z)
        best = torch.maximum(best, values)
        step += 1
    return Ascent(best, best_z, step)


@dataclass(frozen=True, eq=False)
class BoundedAscent:
    """max of `payoff`(R, z) over |W| <= `most` R for growing R, |W| = `size`(z), by ascents of at
    most `steps`.

    z has a leading axis for several starts.
    """

    payoff: Callable[[float, Tensor], Tensor]
    steps: int
    size: Map = frobenius
    most: float = 1.0
    shares: tuple[float, ...] = (1.0,)

    def within(self, radius: float, z: Tensor) -> Tensor:
        """z, shortened to the bound if it is longer."""
        return z / (self.size(z) / (self.most * radius)).clamp_min(1)

    def stretched(self, radius: float, z: Tensor) -> Tensor:
        """z at each of the shares of the bound."""
        length = self.size(z)
        return torch.cat(
            [z * (share * radius / torch.where(length == 0, 1.0, length)) for share in self.shares]
        )

    def best(self, radius: float, starts: Tensor) -> Tensor:
        """The start with the largest payoff."""
        first = self.payoff(radius, starts).argmax()
        return starts[first : first + 1]

    def climb(
        self, radius: float, starts: Tensor, steps: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The best value found from any of the starts, and its z."""
        if steps is None:
            steps = self.steps
        payoff = partial(self.payoff, radius)
        within = partial(self.within, radius)
        ascents = ascend(payoff, starts, (-2, -1), within, steps)
        first = ascents.best.argmax()
        return ascents.best[first : first + 1], ascents.z[first : first + 1]


def balanced(
    P: UnbatchedRows, raw: Float[Tensor, "*starts tokens width"]
) -> Float[Tensor, "*starts tokens width"]:
    """raw_j sqrt(|p_j|/max |p|), at least raw_j/1000: at these lengths a norm curves the payoff
    equally for all tokens.
    """
    size = torch.linalg.vector_norm(P, dim=-1, keepdim=True)
    largest = size.amax()
    share = size / torch.where(largest == 0, 1.0, largest)
    lengthened: Tensor = raw * share.sqrt().clamp_min(SMALL)
    return lengthened


def _slope(payoff: Map, z: Tensor) -> tuple[Tensor, Tensor]:
    """The payoffs and their gradient."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        values = payoff(z)
        (gradient,) = torch.autograd.grad(values.sum(), z)
    return values.detach(), gradient
