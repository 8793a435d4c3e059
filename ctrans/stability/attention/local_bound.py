"""A sharper local form of Emadi's theorem 5.1: it depends on the distances between tokens, not on
their lengths.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.fields import ExposesHeads, HeadMatrices, spectral_norm
from ctrans.stability.attention.bounds import attention_theta
from solvers import ConfigError

STEPS = 64
"""Steps of the search for a centre. Any centre gives an enclosing radius, so fewer steps only make
it less sharp.
"""


@torch.no_grad()
def local_attention_bound(attention: ExposesHeads, u: Float[Tensor, "*batch tokens width"]) -> float:
    """max_i sum_h |W_h V_h| + theta_ih/(tau sqrt(d_h)) rad(W_h v) (|Q_h| rad(k) + |q_i| |K_h|) >=
    the local value of f at U.

    q, k, v are the head's queries, keys and values at U, W_h its columns of W_O, and rad the radius
    of a ball that encloses a sequence's tokens. Changes of attention sum to zero over a row, so W_h
    v may be measured from any centre. An equal change of all scores of a row has no effect, so keys
    may too, unless positions rotate them or a cap bends the scores. In those cases rad(k) is the
    length of the longest key. Emadi has 2 B^2 |Q||K||V||W_O| for the second factor, with B the
    longest token. Raises ConfigError for normalised queries and keys, whose scores are not
    bilinear.
    """
    if attention.normalised_scores:
        raise ConfigError("the local bound does not cover qk_norm: it needs queries and keys that are linear in the input")
    x = u.double()
    theta = attention_theta(attention, u).upper.double()
    total = torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
    for index, head in enumerate(attention.head_matrices()):
        query, key = head.query.double(), head.key.double()
        through = head.out.double() @ head.value.double()
        q = x @ query.mT if head.query_offset is None else x @ query.mT + head.query_offset.double()
        keys, values = (part.unsqueeze(-1) for part in (_key_radius(x @ key.mT, head), enclosing_radius(x @ through.mT)))
        scores = spectral_norm(query) * keys + torch.linalg.vector_norm(q, dim=-1) * spectral_norm(key)
        scale = attention.temperature * math.sqrt(len(query))
        total = total + spectral_norm(through) + theta[..., index, :] / scale * values * scores
    return float(total.max())


def _key_radius(k: Float[Tensor, "*batch tokens head"], head: HeadMatrices) -> Float[Tensor, "*batch"]:
    """Largest distance of a key from a centre that shifts all scores of a row equally: any point,
    or 0 if the offset k_0 counts.

    A rotation keeps a key's length, and a cap has slope at most 1.
    """
    if head.key_offset is None:
        return enclosing_radius(k)
    longest: Tensor = torch.linalg.vector_norm(k + head.key_offset.to(k.dtype), dim=-1).amax(-1)
    return longest


def enclosing_radius(x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
    """The radius of a ball around each sequence's tokens, a few per cent above the smallest (Badoiu
    and Clarkson, 2003).
    """
    centre = x.mean(-2, keepdim=True)
    radius = torch.full(x.shape[:-2], math.inf, dtype=x.dtype, device=x.device)
    for step in range(STEPS):
        apart = torch.linalg.vector_norm(x - centre, dim=-1)
        radius = torch.minimum(radius, apart.amax(-1))
        farthest = x.gather(-2, apart.argmax(-1)[..., None, None].expand(*x.shape[:-2], 1, x.shape[-1]))
        centre = centre + (farthest - centre) / (step + 2)
    return radius
