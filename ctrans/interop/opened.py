"""An opened model of any origin: its depth, its loss, and how it reads text."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.imported import Imported
from ctrans.interop.losses import LOSS_NAMES, AnyModel, Loss, ModelAround, ModelWithLoss, with_loss
from ctrans.interop.tokens import Tokeniser, find_tokeniser
from ctrans.measure.walk import own_loss
from solvers import checked

HIDDEN_EVERY = 7
"""One token in so many is hidden from a masked language model, at fixed places: about the 15% of
BERT's training.
"""
STAND_INS = ("mean", "random", "none")
"""Losses that a description names, because the model was not trained for them."""


@checked
class Opened(ModelAround):
    """A model opened for analysis. It computes in eval mode and without gradients of weights.

    It is a model itself: its `depth`, `embed`, `head`, `trajectory` and loss are those of `model`.

    - `directory`: where it was read
    - `described`: what was recognised
    - `vocabulary`: the number of tokens that it embeds; 0 if it reads other inputs
    - `causal`: whether tokens read only earlier tokens, as its first attention computes
    - `predicts`: whether its head gives logits of tokens
    - `loss`: a name in `LOSS_NAMES`, or "given"
    """

    model: AnyModel | ModelWithLoss

    def __init__(
        self,
        model: AnyModel,
        directory: Path | None,
        described: str,
        loss: str | Loss | None,
        vocabulary: int,
        *,
        causal: bool,
        predicts: bool,
    ):
        super().__init__()
        self.model, self.loss = with_loss(model, loss, predicts=predicts, causal=causal)
        if self.loss in STAND_INS or (not predicts and self.loss in LOSS_NAMES):
            described += f"; loss: {LOSS_NAMES[self.loss]}"
        self.directory = directory
        self.described = described
        self.vocabulary = vocabulary
        self.causal = causal
        self.predicts = predicts

    def forward(self, tokens: Tensor, targets: Any = None) -> tuple[Tensor, Tensor | None]:
        """The output of the head, and with `targets` the loss."""
        found: tuple[Tensor, Tensor | None] = self.model(tokens, targets)
        return found

    @property
    def reads(self) -> tuple[int, ...]:
        """The shape of one input, without the batch axis, as in the example by which it was
        opened.
        """
        return tuple(self._row.shape)

    @property
    def _row(self) -> Tensor:
        """One input of that example."""
        if isinstance(self.model, ModelWithLoss):
            model = self.model.model
        else:
            model = self.model
        if isinstance(model, Imported):
            return model.adapter.row
        return torch.zeros(1, dtype=torch.int64)

    @property
    def terminal_loss(self) -> Callable[[Tensor, Any], Tensor] | None:
        """L(X_T, targets), unless it is the cross-entropy of the logits."""
        return own_loss(self.model)

    def tokeniser(self) -> Tokeniser:
        """The tokenizer of its directory; bytes for a model without a directory. Errors as
        `find_tokeniser`.
        """
        return find_tokeniser(self.directory, self.vocabulary)

    def longest(self, wanted: int) -> int:
        """The most tokens, at most `wanted`, that it reads: what the model states, or what was
        found by trying.
        """
        said: int | None = self.config.context
        if said is None:
            most = wanted
        else:
            most = min(wanted, said)
        if said is not None or not self.vocabulary or self._reads(most):
            return most
        return 1 + bisect.bisect_left(
            range(2, most), True, key=lambda length: not self._reads(length)
        )

    def _reads(self, length: int) -> bool:
        like = next(self.parameters(), torch.empty(0))
        row = self._row
        try:
            with torch.no_grad():
                self(row[torch.arange(length) % len(row)].unsqueeze(0).to(like.device))
        except FOREIGN_ERRORS:
            return False
        return True

    def pairs(
        self, windows: Int[Tensor, "batch longer"], mask: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens and their targets for its `loss`.

        - "next": the target is the next token
        - "mlm": every seventh token is hidden by `mask` and is the target there; targets are -1
          elsewhere. Without a mask each token is its own target, as for the chosen tokens that such
          a training leaves unchanged
        - "none": targets are -1 everywhere
        - stand-ins ignore targets; a given loss gets the targets of "next" if the model is causal
          and of "mlm" otherwise
        """
        tokens = windows[:, :-1]
        after = windows[:, 1:]
        if self.loss != "given":
            kind = self.loss
        elif self.causal:
            kind = "next"
        else:
            kind = "mlm"
        if kind == "none":
            return tokens, torch.full_like(tokens, -1)
        if kind == "next":
            return tokens, after
        if kind != "mlm" or mask is None:
            return tokens, tokens
        hidden = (
            torch.arange(tokens.shape[1], device=tokens.device) % HIDDEN_EVERY == 0
        ).expand_as(tokens)
        return torch.where(hidden, mask, tokens), torch.where(hidden, tokens, -1)
