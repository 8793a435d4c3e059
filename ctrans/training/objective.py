"""The objective of a training, as one module that compilation and distribution can wrap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import Scalar, TokenBatch
from ctrans.dynamics.fields import Balances, HasAuxiliary
from ctrans.model.gpt import GPT
from ctrans.training.settings import TrainConfig
from solvers import Map, Save, Segment
from solvers.solve import solve


class Losses(NamedTuple):
    """The result of `Objective`: training minimises `total`, and the rest is reported.

    - `cross_entropy`: in nats
    - `auxiliary`: in training mode, each auxiliary term with its mean over maps
    - `loads`: in training mode with a `bias_rate`, the load of the parts of each map that balances
      them
    - `first_square`, `last_square`, `largest`: in evaluation mode, the mean square of the entries
      of X_0 and X_T, and the largest |entry| of all states
    - `accuracy`: in evaluation mode, the share of targets that have the largest logit
    """

    total: Scalar
    cross_entropy: Scalar
    auxiliary: tuple[tuple[str, Scalar], ...] = ()
    loads: tuple[Float[Tensor, " parts"], ...] = ()
    first_square: Scalar | None = None
    last_square: Scalar | None = None
    largest: Scalar | None = None
    accuracy: Scalar | None = None


class Objective(nn.Module):
    """J = cross-entropy(head(X_T), targets) + lam/2 mean over tokens of int_0^T |v(X, t)|^2 dt +
    sum_k sum_a w_a a_k(N_in X(t_k)), where a_k are the auxiliary terms of the map of segment k at
    its first input (`HasAuxiliary`).

    w_a is the setting with the name of the term, or 1. Euler with one step, backprop, lam = 0 and
    no such terms is the discrete model, bit for bit. The kinetic cost (OT-Transformer) is a further
    coordinate of each token, dc/dt = |v|^2/2, so that all methods and gradient kinds integrate it
    with X. Raises ConfigError for a gradient kind that the method or the placement does not
    support.
    """

    def __init__(self, model: GPT, config: TrainConfig):
        super().__init__()
        self.model = model
        self.config = config
        self.scheme = config.scheme
        self.scheme.check(model.depth)
        self.has_terms = any(
            isinstance(branch.field, HasAuxiliary)
            for part in model.depth.sublayers
            for branch in part.branches.values()
        )

    def forward(self, tokens: TokenBatch, targets: TokenBatch) -> Losses:
        """The losses of these sequences. Raises the errors of `GPT.embed` and `solve`."""
        x = self.model.embed(tokens)
        states, cost = self._flow(x)
        logits = self.model.head(states[-1]).flatten(0, -2)
        cross_entropy = F.cross_entropy(logits, targets.flatten(), ignore_index=-1)
        if cost is None:
            total = cross_entropy
        else:
            total = cross_entropy + self.config.kinetic * cost
        if self.training:
            terms: dict[str, list[Tensor]] = {}
            if self.has_terms:
                terms = self._auxiliary(states)
            for name, values in terms.items():
                total = total + getattr(self.config, name, 1.0) * torch.stack(values).sum()
            means = tuple(
                (name, torch.stack(values).mean().detach()) for name, values in terms.items()
            )
            loads: tuple[Tensor, ...] = ()
            if self.config.bias_rate and self.has_terms:
                loads = self._loads(states)
            return Losses(total, cross_entropy.detach(), means, loads)
        largest = torch.stack([state.abs().max() for state in states]).max()
        counted = targets.flatten() != -1
        right = (logits.argmax(-1) == targets.flatten()) & counted
        return Losses(
            total,
            cross_entropy,
            first_square=x.square().mean(),
            last_square=states[-1].square().mean(),
            largest=largest,
            accuracy=right.sum() / counted.sum(),
        )

    def _inputs(self, states: tuple[Tensor, ...], protocol: type) -> Iterator[tuple[Any, Tensor]]:
        """Each map that satisfies the protocol, with its first input."""
        for sublayer, state in zip(self.model.depth.sublayers, states[:-1], strict=True):
            for branch in sublayer.branches.values():
                if isinstance(branch.field, protocol):
                    yield branch.field, branch.given(sublayer.given(sublayer.enter(state)))

    def _auxiliary(self, states: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
        """The values of each term, over all maps that have it."""
        terms: dict[str, list[Tensor]] = {}
        for field, u in self._inputs(states, HasAuxiliary):
            for name, value in field.auxiliary(u).items():
                terms.setdefault(name, []).append(value)
        return terms

    @torch.no_grad()
    def _loads(self, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The load of each map that balances its parts."""
        return tuple(field.load(u) for field, u in self._inputs(states, Balances))

    def _flow(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The states that the losses need, with X_T last, and the mean over tokens of int |v|^2/2
        dt if lam > 0.
        """
        config = self.config
        depth = self.model.depth
        if self.scheme.evaluates_once and not config.kinetic:
            # a solver's checks would end a compiler's graph
            if self.training and not self.has_terms:
                return (depth(x),), None
            return depth.states(x), None
        segments = self.scheme.segments(depth)
        width = x.shape[-1]
        if config.kinetic:
            segments = [kinetic_segment(segment, width) for segment in segments]
            x = torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], dim=-1)
        save: Save = "segments"
        if self.training and not self.has_terms:
            save = "ends"
        states = solve(segments, x, **self.scheme.request(), save=save).states
        if not config.kinetic:
            return states, None
        return tuple(state[..., :width] for state in states), states[-1][..., width].mean()


def kinetic_segment(segment: Segment, width: int) -> Segment:
    """The segment with a further coordinate c of each token, dc/dt = |v|^2/2. Projection and entry
    act on the others only.
    """

    def field(t: Tensor, z: Tensor) -> Tensor:
        v = segment.field(t, z[..., :width]).to(z.dtype)
        return torch.cat([v, v.square().sum(-1, keepdim=True) / 2], dim=-1)

    return Segment(
        segment.t0,
        segment.t1,
        field,
        project=_on_state(segment.project, width),
        enter=_on_state(segment.enter, width),
    )


def _on_state(map_: Map | None, width: int) -> Map | None:
    if map_ is None:
        return None
    return lambda z: torch.cat([map_(z[..., :width]), z[..., width:]], dim=-1)
