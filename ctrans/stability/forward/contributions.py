"""What each sublayer contributes to the last state and to a logit: sums that are exact at the norms' scales as they are."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.depth import Depth
from ctrans.model.gpt import GPT
from ctrans.norm import Norm
from ctrans.walk import Instrument, Passage, walk
from solvers import ConfigError

ROUNDING = 1e-3
"""By how much scale times parts may miss the norm, relatively, in float32; more says that the norm is no scaling of its input."""


@dataclasses.dataclass(frozen=True, eq=False)
class Contributed:
    """X_K = sum_k `parts`[k] + `offsets`: parts[0] came from the embedding, parts[k + 1] from sublayer k, offsets from norms' beta."""

    parts: Float[Tensor, "count *batch tokens width"]
    offsets: Float[Tensor, "*batch tokens width"]

    def through(self, norm: Norm, x: Float[Tensor, "*batch tokens width"]) -> Contributed:
        """The same behind a norm, which at its scale at x is affine: N(v) = gamma * C v/sigma(x) + beta.

        Raises ConfigError for a norm that is not such a scaling at x.
        """
        scaled = norm.gamma * norm.standardize(x)
        centre = x - x.mean(-1, keepdim=True) if norm.centred else x
        sigma = centre.norm(dim=-1, keepdim=True) / norm.standardize(x).norm(dim=-1, keepdim=True)

        def affine(v: Tensor) -> Tensor:
            moved: Tensor = norm.gamma * (v - v.mean(-1, keepdim=True) if norm.centred else v) / sigma
            return moved

        if not torch.allclose(affine(x), scaled, rtol=ROUNDING, atol=ROUNDING * float(scaled.abs().max())):
            raise ConfigError(
                f"a {type(norm).__name__} is no scaling of its input, so that nothing is a sum behind it: choose another norm"
            )
        return Contributed(affine(self.parts), affine(self.offsets) + norm.beta)


class Contributions(Instrument):
    """`Contributed` of the last state along the walk. A sublayer adds h r_k(X_k); a norm around the state scales what was there by then.

    A part is what a sublayer wrote, not what the model would lose without it: others read it. It keeps K + 1 states.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._found = Contributed(x0.unsqueeze(0), torch.zeros_like(x0))

    @torch.no_grad()
    def forward(self, at: Passage) -> None:
        norm = at.sublayer.state_norm
        added = at.y - at.x if norm is None else at.h * at.sublayer(at.x)
        found = Contributed(torch.cat([self._found.parts, added.unsqueeze(0)]), self._found.offsets)
        self._found = found if norm is None else found.through(norm, at.x + added)

    def figures(self) -> Contributed:
        return self._found


@torch.no_grad()
def logit_contributions(
    model: GPT, tokens: Int[Tensor, "batch tokens"], targets: Int[Tensor, "batch tokens"]
) -> tuple[Float[Tensor, "count batch tokens"], Float[Tensor, "batch tokens"]]:
    """What the embedding and each sublayer add to the logit of every token's target less the mean logit, and what offsets add.

    logit_t - mean logit = <w_t - mean w, N_final(X_K)>, a sum over the parts of X_K at the final norm's scale (direct logit
    attribution; Elhage et al. 2021). Raises ConfigError for norms that are no scalings.
    """
    states = Contributions()
    last = _LastState()
    walk(model, tokens, None, [states, last])
    found = states.figures()
    if isinstance(model.final_norm, Norm):
        found = found.through(model.final_norm, last.figures())
    weight = model.token_embedding.weight
    direction = weight[targets] - weight.mean(0)
    return (found.parts * direction).sum(-1), (found.offsets * direction).sum(-1)


class _LastState(Instrument):
    def forward(self, at: Passage) -> None:
        self._x = at.y

    def figures(self) -> Tensor:
        return self._x
