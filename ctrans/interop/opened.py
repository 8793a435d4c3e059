"""A model that was opened, whoever wrote it: what instruments ask of any model, how it reads, and
what it is trained for.
"""

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
from ctrans.interop.losses import AnyModel, ModelAround, ModelWithLoss
from ctrans.interop.tokens import Tokeniser, find_tokeniser
from ctrans.walk import own_loss

HIDDEN_EVERY = 7
"""One token in so many is hidden from a model that fills gaps: the 15 % of BERT's training, at
fixed places.
"""


class Opened(ModelAround):
    """A model that was opened: in evaluation mode, without gradients, with what `ctrans` asks of
    any model, and how it reads.

    It is a model itself, whose `depth`, `embed`, `head`, `trajectory` and loss are those of
    `model`. `directory` is where it was, and `described` what was recognised. `vocabulary` is how
    many tokens it embeds, 0 for what reads none. `causal` is whether tokens read only earlier ones,
    as seen in what its first attention computes. `predicts` is whether its head gives logits of
    tokens. `loss` is its loss by a name of `LOSS_NAMES`, or "given".
    """

    model: AnyModel | ModelWithLoss

    def __init__(
        self,
        model: AnyModel | ModelWithLoss,
        directory: Path | None,
        described: str,
        vocabulary: int,
        causal: bool,
        predicts: bool,
        loss: str,
    ):
        super().__init__()
        self.model, self.directory, self.described = model, directory, described
        self.vocabulary, self.causal, self.predicts, self.loss = vocabulary, causal, predicts, loss

    def forward(self, tokens: Tensor, targets: Any = None) -> tuple[Tensor, Tensor | None]:
        """What the head gives, and with `targets` the loss."""
        found: tuple[Tensor, Tensor | None] = self.model(tokens, targets)
        return found

    @property
    def reads(self) -> tuple[int, ...]:
        """The shape of what it reads, without the first axis: that of the example by which it was
        seen.
        """
        return tuple(self._imported.adapter.row.shape) if isinstance(self._imported, Imported) else (1,)

    @property
    def _imported(self) -> AnyModel:
        return self.model.model if isinstance(self.model, ModelWithLoss) else self.model

    @property
    def terminal_loss(self) -> Callable[[Tensor, Any], Tensor] | None:
        """L(X_T, targets) where it is not the cross-entropy of its logits."""
        return own_loss(self.model)

    def tokeniser(self) -> Tokeniser:
        """How text becomes its tokens; byte by byte for a model without a directory. Errors as
        `find_tokeniser`.
        """
        return find_tokeniser(self.directory, self.vocabulary)

    def longest(self, wanted: int) -> int:
        """The most tokens, up to as many as wanted, that it reads: what it says, or found by
        trying.
        """
        said: int | None = self.config.context
        most = wanted if said is None else min(wanted, said)
        if said is not None or not self.vocabulary or self._reads(most):
            return most
        return 1 + bisect.bisect_left(range(2, most), True, key=lambda length: not self._reads(length))

    def _reads(self, length: int) -> bool:
        like = next((weight for weight in self.parameters()), torch.empty(0))
        row = self._imported.adapter.row if isinstance(self._imported, Imported) else torch.zeros(1, dtype=torch.int64)
        try:
            with torch.no_grad():
                self(row[torch.arange(length) % len(row)].unsqueeze(0).to(like.device))
        except FOREIGN_ERRORS:
            return False
        return True

    def pairs(self, windows: Int[Tensor, "batch longer"], mask: int | None = None) -> tuple[Tensor, Tensor]:
        """Tokens and their targets, of its `loss`.

        "next": each next token. "mlm": every seventh token is hidden by `mask`, and is the target
        there, -1 elsewhere; without a mask every token is its own target, the part of such a
        training in which chosen tokens are left as they are. "none": -1 throughout. Stand-ins look
        at no targets, and a given loss gets those of a model that reads as this one does.
        """
        tokens, after = windows[:, :-1], windows[:, 1:]
        kind = self.loss if self.loss != "given" else "next" if self.causal else "mlm"
        if kind == "none":
            return tokens, torch.full_like(tokens, -1)
        if kind == "next":
            return tokens, after
        if kind != "mlm" or mask is None:
            return tokens, tokens
        hidden = (torch.arange(tokens.shape[1], device=tokens.device) % HIDDEN_EVERY == 0).expand_as(tokens)
        return torch.where(hidden, mask, tokens), torch.where(hidden, tokens, -1)
