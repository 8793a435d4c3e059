"""A final norm and a linear map, found in a head that only computes: the head of another library's
model.

Behind a norm that divides by a token's size the logits of a large multiple of e_i are sqrt(d) W
(gamma * C e_i)/|C e_i| + b. So d states, and one of the opposite sign, have all of W gamma and b.
Random states then show whether the head is this map, with which C, which eps, and how far from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.norm import PlainLayerNorm, PlainRMSNorm, SphereNorm
from solvers import ConfigError

LARGE = 1e4
"""The size of the entries of a state at which no eps counts."""
SMALL = 1e-2
"""The size of those that show eps."""
CLOSE = 1e-3
"""The largest distance of logits from those of the map, as a share of the largest."""
ENTRIES = 200_000_000
"""The largest number of entries of a map that is read."""


@dataclass(frozen=True, eq=False)
class ProbedHead:
    """logits = W x_hat + b, x_hat from a norm without gains; `error` is the largest distance of the
    head's logits from it at the states that were tried.
    """

    norm: SphereNorm
    weight: Float[Tensor, "vocab width"]
    offset: Float[Tensor, " vocab"]
    error: float

    def logits(self, n: TokenRows) -> Tensor:
        """The logits of x_hat = sqrt(d) n."""
        return F.linear(math.sqrt(self.norm.width) * n, self.weight, self.offset)


@torch.no_grad()
def probed_head(head: Callable[[Tensor], Tensor], like: TokenRows) -> ProbedHead:
    """The norm and the map of a head, which is asked for states of the shape of `like`.

    Raises ConfigError for a head that is no such map, and for one of too many entries.
    """
    width = like.shape[-1]
    vocabulary = head(like).shape[-1]
    if width * vocabulary > ENTRIES:
        raise ConfigError(
            f"the head has {width} x {vocabulary} entries, and at most {ENTRIES:,} are read"
        )
    eye = LARGE * torch.eye(width, dtype=like.dtype, device=like.device)
    ends = _in_pieces(head, torch.cat([eye, -eye[:1]]), like)
    offset = (ends[0] + ends[-1]) / 2
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
    far = head(LARGE * random)
    for centred, kind in ((True, PlainLayerNorm), (False, PlainRMSNorm)):
        share = math.sqrt(1 - 1 / width) if centred else 1.0
        weight = share * (ends[:-1] - offset).mT / math.sqrt(width)
        norm = kind(width, 0.0).to(like)
        found = F.linear(norm.standardize(random), weight, offset)
        if float((found - far).abs().max()) <= CLOSE * float(far.abs().max()):
            norm = kind(width, _eps(head, norm, weight, offset, random)).to(like)
            error = _error(head, norm, weight, offset, random)
            if error <= CLOSE * float(far.abs().max()):
                return ProbedHead(norm, weight, offset, error)
    raise ConfigError(
        "the head is not one linear map behind a norm that divides by a token's size, so that the"
        " loss is not known to be convex"
    )


def _in_pieces(head: Callable[[Tensor], Tensor], states: Tensor, like: TokenRows) -> Tensor:
    """The head's logits of these states, as tokens of batches of one shape."""
    slots = like.shape[:-1].numel()
    logits = []
    for piece in states.split(slots):
        padded = torch.cat([piece, like.reshape(slots, -1)[: slots - len(piece)]])
        logits.append(head(padded.reshape(like.shape)).flatten(0, -2)[: len(piece)])
    return torch.cat(logits)


def _eps(
    head: Callable[[Tensor], Tensor],
    norm: SphereNorm,
    weight: Tensor,
    offset: Tensor,
    random: TokenRows,
) -> float:
    """The eps with which x_hat of a small state is c times that of a large one: m (1/c^2 - 1), m
    the mean square of the state's entries.
    """
    small = SMALL * random
    direction = F.linear(norm.standardize(small), weight)
    shorter = ((head(small) - offset) * direction).sum(-1) / direction.square().sum(-1)
    square = norm.centre(small).square().mean(-1)
    return max(float((square * (1 / shorter.square() - 1)).median()), 0.0)


def _error(
    head: Callable[[Tensor], Tensor],
    norm: SphereNorm,
    weight: Tensor,
    offset: Tensor,
    random: TokenRows,
) -> float:
    """The largest distance of logits from those of the map, over states of several sizes."""
    distances = []
    for size in (SMALL, 1.0, LARGE):
        found = F.linear(norm.standardize(size * random), weight, offset)
        distances.append(float((found - head(size * random)).abs().max()))
    return max(distances)
