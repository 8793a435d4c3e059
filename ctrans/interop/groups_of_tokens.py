"""Rows of attention within groups of tokens, such as windows of an image, as rows of whole
sequences.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

TokenPlaces = Int[Tensor, "*places"]
"""For each place, group by group or place by place, the number of its token among the tokens of all
sequences; -1 for a place without a token.
"""


def places_in(moved: Float[Tensor, "*places width"]) -> TokenPlaces | None:
    """The places of tokens in states that were moved from `numbered` states; None if they were not
    only moved.
    """
    numbers = moved[..., 0]
    if not (moved == numbers.unsqueeze(-1)).all() or not (numbers == numbers.round()).all():
        return None
    places: Tensor = numbers.long() - 1
    there = places[places >= 0]
    if len(there) != len(there.unique()):
        return None  # a token is in several groups
    return places


def are_in_order(places: TokenPlaces) -> bool:
    """Whether these are the tokens of all sequences one after the other, or the first tokens of all
    before the second ones.
    """
    in_order = torch.arange(places.numel(), device=places.device)
    turned = places.mT if places.dim() == 2 else places
    return torch.equal(places.flatten(), in_order) or torch.equal(turned.flatten(), in_order)


def numbered(like: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
    """States of which each token has its number as all its entries, counted from 1: zeros are what
    is filled in.
    """
    count = like.shape[0] * like.shape[1]
    numbers = torch.arange(1, count + 1, dtype=torch.float64, device=like.device)
    return numbers.reshape(*like.shape[:2], 1).expand(like.shape)


def of_whole_sequences(rows: Tensor, places: TokenPlaces, batch: int, tokens: int) -> Tensor | None:
    """The rows (batch, heads, tokens, tokens) of rows (groups, heads, size, size), or (groups *
    heads, size, size); None if the groups are others, or leave out a token.
    """
    size = rows.shape[-1]
    groups = places.numel() // size
    if groups * size != places.numel() or len(rows) % groups or rows.shape[-2] != size:
        return None
    if rows.dim() == 3:
        rows = rows.unflatten(0, (groups, -1))
    if len(rows) != groups or int((places >= 0).sum()) != batch * tokens:
        return None
    if places.shape == (size, groups) and size != groups:
        places = places.mT  # torch's attention has the places of groups first
    by_group = places.reshape(groups, size)
    is_there = by_group >= 0
    group, i, j = torch.where(is_there.unsqueeze(2) & is_there.unsqueeze(1))
    query = by_group[group, i]
    key = by_group[group, j]
    if not torch.equal(query // tokens, key // tokens):
        return None  # a group has tokens of several sequences
    whole = rows.new_zeros(batch * tokens, tokens, rows.shape[1])
    whole[query, key % tokens] = rows[group, :, i, j]
    by_sequence: Tensor = whole.unflatten(0, (batch, tokens))
    return by_sequence.permute(0, 3, 1, 2)
