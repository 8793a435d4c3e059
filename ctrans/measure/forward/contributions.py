"""Contribution of each sublayer to the last state and to a logit, as exact sums with the norms'
scales held fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.old_names import OldReasons
from ctrans.base.shapes import TokenBatch, TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.norm import Norm
from ctrans.measure.missing import tried
from ctrans.measure.walk import Instrument, ModelOfModules, StepContext, walk
from ctrans.model.gpt import GPT
from solvers import ConfigError

ROUNDING = 1e-3
"""Largest relative difference, in float32, between a norm and its affine form. Above it the norm
does not scale its input.
"""


@dataclass(frozen=True, eq=False)
class Contributed:
    """X_K = sum_k `parts`[k] + `offsets`: parts[0] from the embedding, parts[k + 1] from sublayer
    k, offsets from norms' beta. `state` is X_K itself.
    """

    parts: Float[Tensor, "count *batch tokens width"]
    offsets: TokenRows
    state: TokenRows

    def through(self, norm: Norm) -> Contributed:
        """The same behind a norm. With its scale fixed at x = X_K it is affine: N(v) = gamma * C
        v/sigma(x) + beta.

        Raises ConfigError if the norm does not have this form at x.
        """
        x = self.state
        scaled = norm.gamma * norm.standardize(x)
        if norm.centred:
            centre = x - x.mean(-1, keepdim=True)
        else:
            centre = x
        sigma = centre.norm(dim=-1, keepdim=True) / norm.standardize(x).norm(dim=-1, keepdim=True)

        def affine(v: Tensor) -> Tensor:
            if norm.centred:
                v = v - v.mean(-1, keepdim=True)
            moved: Tensor = norm.gamma * v / sigma
            return moved

        if not torch.allclose(
            affine(x), scaled, rtol=ROUNDING, atol=ROUNDING * float(scaled.abs().max())
        ):
            raise ConfigError(
                f"a {type(norm).__name__} does not scale its input, so there are no contributions"
                " behind it: choose another norm"
            )
        return Contributed(affine(self.parts), affine(self.offsets) + norm.beta, norm(x))


class Contributions(Instrument):
    """`Contributed` of the last state. A sublayer adds h r_k(X_k). A norm around the state scales
    all parts so far, and mixing of streams applies to each part.

    A part is the sublayer's direct output. Removing the sublayer changes more, because later
    sublayers read it. The instrument keeps K + 1 states.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self.found = Contributed(x0.unsqueeze(0), torch.zeros_like(x0), x0)

    @torch.no_grad()
    def forward(self, at: StepContext) -> None:
        norm = at.sublayer.state_norm
        parts = at.sublayer.enter(self.found.parts)
        offsets = at.sublayer.enter(self.found.offsets)
        x = at.sublayer.enter(at.x)
        if norm is None:
            added = at.y - x
            self.found = Contributed(torch.cat([parts, added.unsqueeze(0)]), offsets, at.y)
        else:
            added = at.h * at.sublayer(x)
            before_norm = Contributed(torch.cat([parts, added.unsqueeze(0)]), offsets, x + added)
            self.found = before_norm.through(norm)


@torch.no_grad()
def logit_contributions(
    model: GPT, contributed: Contributed, targets: TokenBatch
) -> tuple[Float[Tensor, "count batch tokens"], Float[Tensor, "batch tokens"]]:
    """What the parts of X_K contribute to (target logit - mean logit) of each token, and the
    offsets' contribution.

    logit_t - mean logit = <w_t - mean w, N_final(X_K)>, a sum over the parts of X_K at the final
    norm's scale (direct logit attribution; Elhage et al. 2021). Raises ConfigError for norms that
    do not scale their input.
    """
    streams = model.config.state_streams
    if streams > 1:  # the head reads their mean
        contributed = Contributed(
            contributed.parts.unflatten(-1, (streams, -1)).mean(-2),
            contributed.offsets.unflatten(-1, (streams, -1)).mean(-2),
            contributed.state.unflatten(-1, (streams, -1)).mean(-2),
        )
    if isinstance(model.final_norm, Norm):
        contributed = contributed.through(model.final_norm)
    weight = model.head_weight()
    direction = weight[targets] - weight.mean(0)
    of_parts = (contributed.parts * direction).sum(-1)
    of_offsets = (contributed.offsets * direction).sum(-1)
    return of_parts, of_offsets


TO_THE_LOGIT = "added to the target's logit"
"""The measure that needs a head and targets."""


@dataclass(frozen=True)
class ContributionsByDepth:
    """Means over tokens of the contributions of the embedding (first), each sublayer and the norms'
    offsets (last), as in `names`.

    `state` is <part, X_K>/|X_K|^2, which sums to 1. `size` is |part|/|X_K|. `logit` is the
    contribution to (target logit - mean logit); None if unknown: `missing` then has the reason
    under "added to the target's logit".
    """

    names: list[str]
    state: list[float]
    size: list[float]
    logit: list[float] | None
    missing: dict[str, str] = field(default_factory=dict)

    note = OldReasons(TO_THE_LOGIT, nothing="")


@torch.no_grad()
def contributions_by_depth(
    model: ModelOfModules, tokens: Tensor, targets: TokenBatch | None
) -> ContributionsByDepth:
    """`ContributionsByDepth` of a batch. Raises ConfigError for norms around the state that do not
    scale their input.
    """
    contributed: Contributed = walk(model, tokens, None, [Contributions()])[0]
    all_parts = torch.cat([contributed.parts, contributed.offsets.unsqueeze(0)]).double()
    x = contributed.state
    square = x.double().square().sum(-1)
    state = ((all_parts * x).sum(-1) / square).flatten(1).mean(1)
    size = (all_parts.norm(dim=-1) / square.sqrt()).flatten(1).mean(1)
    names = [
        "embedding",
        *(f"{k} {part.kind}" for k, part in enumerate(model.depth.sublayers)),
        "offsets",
    ]
    logit = None
    missing: dict[str, str] = {}
    if isinstance(model, GPT) and targets is not None:
        to_logit = tried(missing, TO_THE_LOGIT, logit_contributions, model, contributed, targets)
        if to_logit is not None:
            parts, offsets = to_logit
            logit = [*parts.flatten(1).mean(1).tolist(), float(offsets.mean())]
    else:
        missing[TO_THE_LOGIT] = "contributions to a logit need a ctrans GPT and targets"
    return ContributionsByDepth(names, state.tolist(), size.tolist(), logit, missing)
