"""Which tokens the masks hide that a model computes in its forward pass, or gets in any shape: read
from the calls of its attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from ctrans.base.shapes import TokenMask
from ctrans.measure.attention.attention_calls import (
    AttentionCalls,
    KernelCall,
    looks,
    softmax_input,
)

OUT_OF_REACH = -5e3
"""A score this low is a mask's: half of -10000, the mildest value that libraries add. Weights that
reach it for a whole column, in each head and layer, have no use of that token either.
"""
RUN = 3
"""From this many tokens on, tokens alone of an id that the text has too count as padding."""
WHOLE_CALL: Callable[..., Any] = F.multi_head_attention_forward
WHOLE_SIGNATURE = inspect.signature(F.multi_head_attention_forward)

Unread = Bool[Tensor, "batch tokens tokens"]
"""Row i is true at the tokens that token i does not read."""


class UnreadPairs:
    """What no head of a pass reads, from the masks and the scores of its attention calls on these
    many sequences and tokens.
    """

    def __init__(self, sequences: int, tokens: int):
        self.sequences = sequences
        self.tokens = tokens
        self.found: Unread | None = None

    def calls(self) -> AttentionCalls:
        """Inside of it, the attention calls of a pass are looked at."""

        def of_whole_call(output: Any, *args: Any, **kwargs: Any) -> None:
            self._of_whole_call(WHOLE_SIGNATURE.bind(*args, **kwargs).arguments)

        after = looks(self._of_kernel, self._of_softmax)
        return AttentionCalls(after={**after, WHOLE_CALL: of_whole_call})

    def _of_kernel(self, output: Tensor, *args: Any, **kwargs: Any) -> None:
        call = KernelCall(*args, **kwargs)
        shape = (*call.query.shape[:-1], call.key.shape[-2])
        if call.attn_mask is None:
            unread = torch.zeros(shape, dtype=torch.bool)
        else:
            unread = _masked(call.attn_mask, when_true=False).expand(shape)
        if call.is_causal:
            unread = unread | _later(unread)
        self._note(unread)

    def _of_softmax(self, output: Tensor, *args: Any, **kwargs: Any) -> None:
        self._note(softmax_input(*args, **kwargs) <= OUT_OF_REACH)

    def _of_whole_call(self, call: Mapping[str, Any]) -> None:
        query, key = call["query"], call["key"]  # (tokens, sequences, width)
        if query.dim() != 3:
            return
        rows = (query.shape[1], call["num_heads"], query.shape[0], key.shape[0])
        unread = torch.zeros(rows, dtype=torch.bool, device=query.device)
        pairs = call.get("attn_mask")
        if pairs is not None:
            masked = _masked(pairs, when_true=True)
            if masked.dim() == 3:
                masked = masked.unflatten(0, rows[:2])
            unread = unread | masked
        padding = call.get("key_padding_mask")
        if padding is not None:
            unread = unread | _masked(padding, when_true=True)[:, None, None]
        self._note(unread)

    def _note(self, unread: Tensor) -> None:
        """Adds one call's: a token counts as read if any call reads it. Calls on other rows than
        the tokens, such as those of a cross-attention, are left out.
        """
        if unread.dim() not in (3, 4) or unread.shape[-2:] != (self.tokens, self.tokens):
            return
        if unread.shape[0] % self.sequences:
            return
        by_sequence = self._by_sequence(unread).all(1).cpu()
        if self.found is None:
            self.found = by_sequence
        else:
            self.found = self.found & by_sequence

    def _by_sequence(self, unread: Tensor) -> Tensor:
        """Pairs (sequences, heads, tokens, tokens). Where both share an axis, the heads come first
        if only so a mask hides the same from all heads of a sequence.
        """
        sequences_first = unread.reshape(self.sequences, -1, self.tokens, self.tokens)
        heads_first = unread.reshape(-1, self.sequences, self.tokens, self.tokens).transpose(0, 1)
        if unread.dim() == 3 and not _is_of_all(sequences_first) and _is_of_all(heads_first):
            return heads_first
        return sequences_first


def _is_of_all(by_sequence: Tensor) -> bool:
    """Whether all heads of a sequence have the same pairs."""
    return bool((by_sequence == by_sequence[:, :1]).all())


def _masked(mask: Tensor, *, when_true: bool) -> Tensor:
    """Where a mask hides: a boolean one by that value, one that is added by its low values."""
    if mask.dtype == torch.bool:
        return mask == when_true
    return mask <= OUT_OF_REACH


def _later(pairs: Tensor) -> Tensor:
    """True at (i, j) with j > i."""
    rows, columns = pairs.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool, device=pairs.device).triu(1)


def hidden_tokens(unread: Unread, ids: Int[Tensor, "batch tokens"] | None = None) -> TokenMask:
    """The tokens that a mask hides from the others, and not only because they come last in their
    text.

    Rows that read all tokens count as no evidence: they are those of hidden tokens whose mask was
    lifted, so that their softmax exists. With the tokens' ids, what repeats a hidden token behind
    it is hidden too: in causal attention, nobody could read the last token anyway.
    """
    tokens = unread.shape[-1]
    own = torch.eye(tokens, dtype=torch.bool)
    reads_all = ~unread.any(-1, keepdim=True)
    from_others = (unread | reads_all | own).all(-2)
    not_itself = unread.diagonal(dim1=-2, dim2=-1)
    itself_alone = (unread | own).all(-1)
    lifted = reads_all[..., 0] & ~reads_all.all(-2)
    lifted[:, -1] = False  # the last token of a causal text reads all
    if ids is not None:
        itself_alone &= ~_of_text(ids, ~from_others, itself_alone)
    hidden = from_others & (not_itself | itself_alone | lifted)
    for sequence, token in (from_others & ~hidden).nonzero().tolist():
        readers = ~reads_all[sequence, :, 0]
        hidden[sequence, token] = _was_passed_over(unread[sequence], token, readers)
    if ids is None:
        return hidden
    repeats = (ids == ids.roll(1, -1)) & from_others
    for token in range(1, tokens):
        hidden[:, token] |= repeats[:, token] & hidden[:, token - 1]
    return hidden


def hidden_from_others(unread: Unread) -> TokenMask:
    """The tokens that no other token reads."""
    own = torch.eye(unread.shape[-1], dtype=torch.bool)
    return (unread | own).all(-2)


def _of_text(
    ids: Int[Tensor, "batch tokens"], read: TokenMask, alone: TokenMask
) -> Bool[Tensor, "batch tokens"]:
    """The tokens alone that are of an id which other tokens read elsewhere, such as a separator
    with which a sequence ends: a document of one token. Padding of such an id comes in runs.
    """
    in_text = torch.isin(ids, ids[read])
    in_run = torch.zeros_like(alone)
    if alone.shape[-1] >= RUN:
        runs = alone.unfold(-1, RUN, 1).all(-1)  # by the place at which they begin
        for place in range(RUN):
            in_run[:, place : place + runs.shape[-1]] |= runs
    return in_text & ~in_run


def _was_passed_over(
    unread: Bool[Tensor, "tokens tokens"], token: int, readers: Bool[Tensor, " tokens"]
) -> bool:
    """Whether one of the readers that could read the token does not: one behind it, or one that
    reads a token behind it. It must read another one that the token reads too. So they belong to
    one text, as tokens of two documents in one sequence do not.
    """
    others = readers.clone()
    others[token] = False
    others[:token] &= ~unread[:token, token + 1 :].all(-1)
    common = ~unread[token]
    common[token] = False
    return bool((~unread[others] & common).any())
