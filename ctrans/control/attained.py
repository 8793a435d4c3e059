"""What training attains: at a critical point <P, v> = 0. The maximum principle holds for shared
weights, not for each token.

A sublayer's raw velocity r is linear in its last factor theta: the last linear map with its bias,
or the output norm's gains and offsets. So <theta, dL/dtheta> = h <P, r> over a step of length h,
where P is the gradient at the sum X + h r. If the loss is stationary in theta, <P, r> is therefore
0, and so is the alignment: a trained layer does not point along its steepest allowed descent. With
a decay lam/2 |theta|^2 in the loss, h <P, r> = -lam |theta|^2 (for the part of theta that decays).
AdamW's decoupled decay is no such term and has other fixed points. All of this holds for one loss:
on another text than the training text, a trained model need not make these quantities 0.

All tokens and data share the weights. Pontryagin's principle for the weights therefore maximises
the sum over tokens and mean over data of -<P, r_theta> over theta: the mean-field principle (P
holds the mean). The shared gap is the rest of that maximum, within the present norm of the
parameters. The first-order condition of that maximum holds if the gradient of the loss vanishes or
points against the parameters, as at a minimum with decay. The maximum itself need not be attained:
a sublayer is not linear in all of its parameters, and where two factors are 0 the gradient is 0
although both together would gain. Nor need the principle hold where the discrete model is best: for
finite steps it is only approximate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ctrans.base.as_found import leaving_as_found
from ctrans.control.ascent import BoundedAscent, frobenius, noise
from ctrans.control.costate import Costate, costate, places
from ctrans.control.last_map import projected_field
from ctrans.control.residual_pullback import support_towards_image
from ctrans.control.set_of_placement import admissible_set
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk import Model, SegmentCallback
from solvers import ConfigError

Parameters = dict[str, Tensor]

STEPS = 60
STARTS = 2
"""Random starts on the parameters' sphere, in addition to the parameters. They can leave a saddle.
"""
MANY = 1_000_000
FEW_STEPS = 15
"""A sublayer of more than MANY weights has one ascent of FEW_STEPS, from the parameters: a lower
bound too.
"""


@dataclass(frozen=True)
class Attained:
    """One entry per segment of the discrete model. Sums run over all tokens; P holds the mean over
    data. Every field suits JSON.

    - `work`: h <P, r>, the first-order change of the loss by the sublayer's own step, P being that
      at X + h r
    - `radial`: <theta, dL/dtheta> of the last factor, by autograd; `identity` is |work - radial|/(h
      |P||r|), rounding
    - `stationarity`: (work + lam |theta|^2)/(h |P||r|), lam the decay of those parts of theta that
      decay: 0 at a critical point
    - `pointwise_gap`: h (H(P) + <P, r>), the first-order gain of velocities that are free at each
      state and token; inf where H is
    - `last_gap`: h times the gain of the best last factor within |theta| <= its present norm,
      sqrt(|theta|^2 |dL/dtheta|^2) + work, exactly
    - `shared_gap`: the gain, found by ascents, of all parameters of the sublayer within their
      present norm, in sum over tokens and mean over data: a lower bound. One ascent starts at the
      parameters, the others (not of sublayers with many weights) at random on their sphere
    - `first_order`: R |g| + <theta, g> with g = dL/dtheta of all parameters and R = |theta|: the
      first-order value of that gap. It is 0 exactly where the first-order condition holds, also at
      a saddle, which has a gap
    """

    loss: float
    times: list[float]
    kinds: list[str]
    placements: list[str]
    work: list[float]
    radial: list[float]
    identity: list[float]
    stationarity: list[float]
    pointwise_gap: list[float]
    last_gap: list[float]
    shared_gap: list[float]
    first_order: list[float]


@torch.no_grad()
@leaving_as_found
def attained(
    model: Model,
    tokens: Tensor,
    targets: Any,
    *,
    weight_decay: float = 0.0,
    decay_gains: bool = False,
    progress: SegmentCallback | None = None,
) -> Attained:
    """How much of the maximum principle a model's parameters leave, for each segment, on one text.

    - `tokens`, `targets`: the text, and the targets of the loss
    - `weight_decay`: lam of lam/2 times the squares of all matrices in the loss
    - `decay_gains`: whether the loss also has lam/2 times the squares of all vectors
    - `progress(k)`: called after the ascents of each segment, which take nearly all of the time

    Raises ConfigError for a map that does not name its last linear map, for weights on demand,
    which are not parameters, and the errors of `costate`.

    >>> attained(model, tokens[:, :-1], tokens[:, 1:]).work
    """
    if model.depth.streamed:
        raise ConfigError(
            "weights on demand are loaded for one pass and cannot be trained: load the whole model"
        )
    costates = costate(model, tokens, targets)
    vector_decay = 0.0
    if decay_gains:
        vector_decay = weight_decay
    identification = places(model.depth)
    figures = [
        field.name for field in fields(Attained) if field.name not in ("loss", *identification)
    ]
    steps = []
    for k, (sublayer, h) in enumerate(zip(model.depth.sublayers, model.depth.lengths, strict=True)):
        step = StepAt.of(sublayer, costates, k, h, (vector_decay, weight_decay))
        steps.append({name: getattr(step, name) for name in figures})
        if progress is not None:
            progress(k)
    columns = {name: [step[name] for step in steps] for name in figures}
    return Attained(costates.loss, **identification, **columns)


ENTERING = ("state_norm.", "residual.mix")
"""Parameters of a sublayer that its velocity does not depend on."""


@dataclass(frozen=True, eq=False)
class StepAt:
    """A sublayer at its input X with the gradient P at X + h r, and the gradient of h <P, r> in
    each parameter.
    """

    sublayer: Sublayer
    x: Tensor
    p: Tensor
    h: float
    decays: tuple[float, float]
    """The decay of vectors and of matrices."""

    @classmethod
    def of(
        cls, sublayer: Sublayer, costates: Costate, k: int, h: float, decays: tuple[float, float]
    ) -> StepAt:
        """That of segment k, of length h."""
        x = sublayer.enter(costates.states[k])
        p = costates.costates[k + 1]
        if sublayer.state_norm is not None:
            pull = torch.func.vjp(sublayer.state_norm, x + h * sublayer(x))[1]
            (p,) = pull(p)
        return cls(sublayer, x, p, h, decays)

    @cached_property
    def velocity(self) -> Tensor:
        velocity: Tensor = self.sublayer(self.x)
        return velocity

    @property
    def work(self) -> float:
        return self.h * float((self.p * self.velocity).sum())

    @property
    def size(self) -> float:
        """h |P||r|, or 1 for 0."""
        size = self.h * float(self.p.norm() * self.velocity.norm())
        if size == 0:
            return 1.0
        return size

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters that the raw velocity depends on."""
        names = [
            name for name, _ in self.sublayer.named_parameters() if not name.startswith(ENTERING)
        ]
        return {name: self.sublayer.get_parameter(name).detach() for name in names}

    @cached_property
    def gradients(self) -> Parameters:
        """dL/dtheta of this step's parameters."""
        pull: Callable[[Tensor], tuple[Parameters]] = torch.func.vjp(
            self._velocity_of, self.parameters
        )[1]
        return pull(self.h * self.p)[0]

    @cached_property
    def last(self) -> Parameters:
        """The last factor by name, in which the velocity is linear: gains and offsets, the last
        linear map, or steps by channel.
        """
        norm = self.sublayer.output_norm
        if self.sublayer.image is not None:
            return {
                name: value for name, value in self.parameters.items() if name == "residual.gain"
            }
        if norm is not None:
            gains = {
                f"output_norm.{name}": value for name, value in norm.linear_parameters().items()
            }
            if not gains:
                raise ConfigError(
                    f"{type(norm).__name__} behind the {self.sublayer.kind} sublayer has no gains"
                    " or offsets, so its velocity is linear in no parameter: choose an output norm"
                    " with gains, or a placement without one"
                )
            return gains
        field = projected_field(self.sublayer)
        # compares storage, because the model may keep them transposed
        storage = {
            (parameter.data_ptr(), parameter.numel())
            for parameter in field.output_projection.parameters()
        }
        last_map = {
            name: value
            for name, value in self.parameters.items()
            if (value.data_ptr(), value.numel()) in storage
        }
        if len(last_map) < len(storage):
            raise ConfigError(
                f"the last linear map of {type(field).__name__} is part of a larger parameter:"
                " store it separately"
            )
        return last_map

    @property
    def radial(self) -> float:
        return sum(float((value * self.gradients[name]).sum()) for name, value in self.last.items())

    @property
    def identity(self) -> float:
        return abs(self.work - self.radial) / self.size

    @property
    def stationarity(self) -> float:
        """(work + lam |theta|^2)/(h |P||r|), with the decay of each part of the last factor."""
        vector_decay, matrix_decay = self.decays
        decayed = 0.0
        for value in self.last.values():
            if value.dim() > 1:
                decay = matrix_decay
            else:
                decay = vector_decay
            decayed += decay * float(value.square().sum())
        return (self.work + decayed) / self.size

    @property
    def last_gap(self) -> float:
        theta = torch.cat([value.flatten() for value in self.last.values()])
        gradient = torch.cat([self.gradients[name].flatten() for name in self.last])
        return float(theta.norm() * gradient.norm()) + self.radial

    @property
    def first_order(self) -> float:
        theta = torch.cat([value.flatten() for value in self.parameters.values()])
        gradient = torch.cat([slope.flatten() for slope in self.gradients.values()])
        return float(theta.norm() * gradient.norm() + (theta * gradient).sum())

    @property
    def pointwise_gap(self) -> float:
        norm = self.sublayer.output_norm
        if self.sublayer.image is not None:
            return self.h * support_towards_image(self.sublayer, self.x, self.p) + self.work
        if norm is None:
            return math.inf
        allowed = admissible_set(norm, self.sublayer.placement)
        hamiltonian = float(allowed.support(self.sublayer.pulled(self.p)).sum())
        return self.h * hamiltonian + self.work

    @property
    def shared_gap(self) -> float:
        names, parts = zip(*self.parameters.items(), strict=True)
        counts = [part.numel() for part in parts]
        theta = torch.cat([part.flatten() for part in parts]).reshape(1, -1, 1)
        radius = frobenius(theta)

        def payoff(radius: float, z: Tensor) -> Tensor:
            pieces = [
                piece.reshape(part.shape)
                for piece, part in zip(z.flatten().split(counts), parts, strict=True)
            ]
            velocity = self._velocity_of(dict(zip(names, pieces, strict=True)))
            return -self.h * (self.p * velocity).sum().reshape(1)

        steps = STEPS
        random_starts = STARTS
        if theta.numel() > MANY:
            steps = FEW_STEPS
            random_starts = 0
        ascent = BoundedAscent(payoff, steps)
        random = noise(theta, torch.Generator().manual_seed(0), random_starts, *theta.shape)
        starts = [theta, *(radius * z / frobenius(z) for z in random)]
        payoffs = []
        for start in starts:
            best, _ = ascent.climb(float(radius), start)
            payoffs.append(float(best))
        return max(payoffs) + self.work

    def _velocity_of(self, parameters: Parameters) -> Tensor:
        """The raw velocity at X with these parameters."""
        velocity: Tensor = torch.func.functional_call(self.sublayer, parameters, (self.x,))
        return velocity
