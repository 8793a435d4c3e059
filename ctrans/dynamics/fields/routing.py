"""Routers, which choose the experts of each token and their weights, and the options of a mixture
of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.base.option import Range, check_options, option
from ctrans.dynamics.fields.feed_forward import GATES
from solvers import ConfigError

PerExpert = Float[Tensor, "*batch experts"]
"""A number for each expert."""


@dataclass(frozen=True)
class Router:
    """Scores s(z) in [0, 1] from the logits z = W_r x, the set S of the k experts with the largest
    s_e + b_e, and gates on S.

    g_e = s_e for e in S. If `normalised`, g_e = s_e/sum_S s, which is the softmax over S of log s.
    Elsewhere g_e = 0. Gates sum to at most 1.
    """

    log_scores: Callable[[Tensor], Tensor]
    normalised: bool

    def gates(self, logits: PerExpert, chosen: Bool[Tensor, "*batch experts"]) -> Tensor:
        """g, with zeros outside the chosen experts."""
        scores = self.log_scores(logits)
        if self.normalised:
            return scores.masked_fill(~chosen, -torch.inf).softmax(-1)
        return scores.exp() * chosen


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


ROUTERS: dict[str, Router] = {
    # Shazeer et al. 2017, Mixtral: g = softmax over the k largest logits
    "topk_softmax": Router(_log_softmax, normalised=True),
    # Switch, ST-MoE, DeepSeekMoE: g = the k largest entries of the softmax over all
    "softmax_topk": Router(_log_softmax, normalised=False),
    # DeepSeek V3: s = sigmoid(z), gates normalised on the k largest
    "sigmoid": Router(F.logsigmoid, normalised=True),
}

EXPERTS: dict[str, str | None] = {"mlp": None, **GATES}
"""The kinds of experts: an FFN by its name in `FFNS`, with the activation of its gate if it has
one.
"""
EXPERT_COUNT = Range(1, 10**6, "a whole number from 1 to 10^6")


class Routing(NamedTuple):
    """For each token: logits z, scores s, the chosen experts, and their gates g. In float32 at
    least.
    """

    logits: PerExpert
    scores: PerExpert
    chosen: Bool[Tensor, "*batch experts"]
    gates: PerExpert


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Options of a mixture of experts. ConfigError names a wrong value and the fix.

    Each token uses `top_k` of `experts` routed experts, and all `shared_experts` with gate 1
    (DeepSeekMoE).
    """

    option_group: ClassVar[str] = "Experts"

    experts: int = option(8, "Routed experts of --ffn moe.", limits=EXPERT_COUNT)
    top_k: int = option(2, "How many of them each token uses.", limits=EXPERT_COUNT)
    shared_experts: int = option(
        0, "Experts that every token uses.", limits=Range(0, 10**6, "a whole number from 0 to 10^6")
    )
    router: str = option("topk_softmax", "How experts are chosen and weighted.", choices=ROUTERS)
    expert: str = option("mlp", "What an expert is.", choices=EXPERTS)

    def __post_init__(self) -> None:
        check_options(self)
        if self.top_k > self.experts:
            raise ConfigError(
                f"top_k = {self.top_k} exceeds the {self.experts} experts: choose at most"
                f" {self.experts}"
            )
        if self.top_k == 1 and ROUTERS[self.router].normalised:
            raise ConfigError(
                f"top_k = 1 with router {self.router!r} always has gate 1, so the router gets no"
                " gradient: choose router softmax_topk, or top_k = 2"
            )

    @property
    def active(self) -> int:
        """The number of experts that a token uses."""
        return self.top_k + self.shared_experts
