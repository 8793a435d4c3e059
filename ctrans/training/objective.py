"""What training minimises, as one module: so that compilation and distribution wrap one thing."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctrans.model.gpt import GPT
from ctrans.training.settings import TrainConfig
from solvers import Segment, solve
from solvers.segment import Map


class Losses(NamedTuple):
    """`total` is what is minimised. The rest is reported: the cross-entropy in nats; and in evaluation mode the mean squares of the
    hidden state's entries at both ends of depth, its largest entry anywhere, and the share of targets that have the largest logit.
    """

    total: Float[Tensor, ""]
    cross_entropy: Float[Tensor, ""]
    first_square: Float[Tensor, ""] | None = None
    last_square: Float[Tensor, ""] | None = None
    largest: Float[Tensor, ""] | None = None
    accuracy: Float[Tensor, ""] | None = None


class Objective(nn.Module):
    """J = cross-entropy(head(X_T), targets) + lam/2 mean over tokens of int_0^T |v(X, t)|^2 dt, X integrated as configured.

    Euler with one step, backprop and lam = 0 is the discrete model, bit for bit. The kinetic cost (OT-Transformer) is one more
    coordinate of each token, dc/dt = |v|^2/2, so that every method and every gradient kind treats it as it treats X. Raises
    ConfigError for a gradient kind that the method or the placement does not have.
    """

    def __init__(self, model: GPT, config: TrainConfig):
        super().__init__()
        self.model, self.config = model, config
        self.scheme = config.scheme
        self.scheme.check(model.depth)

    def forward(self, tokens: Int[Tensor, "batch tokens"], targets: Int[Tensor, "batch tokens"]) -> Losses:
        """The losses of these sequences. Errors are those of `GPT.embed` and `solve`."""
        x = self.model.embed(tokens)
        states, cost = self._flow(x)
        logits = self.model.head(states[-1]).flatten(0, -2)
        cross_entropy = F.cross_entropy(logits, targets.flatten(), ignore_index=-1)
        total = cross_entropy if cost is None else cross_entropy + self.config.kinetic * cost
        if self.training:
            return Losses(total, cross_entropy.detach())
        first, last = (state.square().mean() for state in (x, states[-1]))
        largest = torch.stack([state.abs().max() for state in states]).max()
        told = targets.flatten() != -1
        right = (logits.argmax(-1) == targets.flatten()) & told
        return Losses(total, cross_entropy, first, last, largest, right.sum() / told.sum())

    def _flow(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The states that are looked at, the last one X_T, and the mean over tokens of int |v|^2/2 dt if it has a price."""
        config, depth = self.config, self.model.depth
        if self.training and self.scheme.evaluates_once and not config.kinetic:
            return (depth(x),), None
        segments = self.scheme.segments(depth)
        width = x.shape[-1]
        if config.kinetic:
            segments = [kinetic_segment(segment, width) for segment in segments]
            x = torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], dim=-1)
        states = solve(segments, x, **vars(self.scheme), save="ends" if self.training else "segments").states
        if not config.kinetic:
            return states, None
        return tuple(state[..., :width] for state in states), states[-1][..., width].mean()


def kinetic_segment(segment: Segment, width: int) -> Segment:
    """The segment with one more coordinate c per token, dc/dt = |v|^2/2; projection and entry act on the others only."""

    def field(t: Tensor, z: Tensor) -> Tensor:
        v = segment.field(t, z[..., :width]).to(z.dtype)
        return torch.cat([v, v.square().sum(-1, keepdim=True) / 2], dim=-1)

    return Segment(
        segment.t0, segment.t1, field, project=_on_state(segment.project, width), enter=_on_state(segment.enter, width)
    )


def _on_state(map_: Map | None, width: int) -> Map | None:
    if map_ is None:
        return None
    return lambda z: torch.cat([map_(z[..., :width]), z[..., width:]], dim=-1)
