"""Check of next-token models: whether a token reads later tokens, which it has to predict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctrans.examine.diagnosis.reading import DiagnosticInstrument
from ctrans.measure.findings import Readings
from ctrans.measure.forward.moments import token_lengths
from ctrans.measure.walk import Model, StepContext, Turn
from solvers.run import finite


class ReadsAhead(DiagnosticInstrument):
    """r_k = max over tokens i < N of |X'_i - X_i|/|X_i| after segment k, where X'_0 has -x_N in
    place of the last token's x_N.

    Both passes read the whole batch, so that each sequence keeps its context, such as a memory, and
    values that are equal in exact arithmetic have equal rounding.

    Before the first segment, another token takes the place of the last one, and r is that of X_0.

    In a causal model r_k is 0 up to rounding. The reading is r_k/sqrt(eps), with eps the precision
    of the states, 1e-7 in float32, at the first segment where it is above 1. It uses the first
    sequence, and only targets that are the next tokens, because models of masked tokens read both
    sides on purpose. A sequence of one token has no reading. It does not detect tokens that read
    later ones other than the last, maps with equal output for x_N and -x_N, and changes below
    sqrt(eps), which is 9% in bfloat16.

    The unchanged sequence is a second pass of the same text. If it differs, the model is not the
    same twice, and there is no reading of later tokens.
    """

    name = "what tokens read"

    def start(self, x0: Tensor) -> None:
        self._next = False
        self._assumed = False
        self._differs: tuple[int, float] | None = None
        if self.kept is None:
            text = torch.ones(x0.shape[-2], dtype=torch.bool)
        else:
            text = self.kept[0]
        self._last = 0
        if text.any():
            self._last = int(text.nonzero().max())
        self._x0 = x0
        self._pair = (x0, x0.clone())
        self._pair[1][0, self._last] *= -1
        self._rounding = torch.finfo(x0.dtype).eps ** 0.5
        self._changes = list[float]()

    def forward(self, at: StepContext) -> None:
        before = self._pair[0][0]
        original, changed = self._pair
        self._pair = (at.sublayer.step(original, at.h), at.sublayer.step(changed, at.h))
        first = self._pair[0][0].double()
        flipped = self._pair[1][0].double()
        if (
            self._differs is None
            and finite(first)
            and finite(flipped)
            and (before - at.x[0]).norm() <= self._rounding * at.x[0].norm()
        ):
            apart = float((first - at.y[0]).norm() / at.y[0].double().norm())
            if apart > self._rounding:
                self._differs = (at.k, apart)
        if self._last and finite(first) and finite(flipped):
            self._changes.append(self._relative_change(first, flipped))

    def _relative_change(self, rows: Tensor, changed: Tensor) -> float:
        """max over tokens i < N of |rows'_i - rows_i|/|rows_i|; 0 if there are none."""
        earlier = rows[: self._last]
        if not earlier.numel():
            return 0.0
        size = token_lengths(earlier).clamp(min=torch.finfo(earlier.dtype).tiny)
        return float((token_lengths(changed[: self._last] - earlier) / size).max())

    def head(self, model: Model, at: Turn) -> None:
        self._next = follows(at.tokens, at.targets)
        self._logits_change = 0.0
        self._embedding_change = 0.0
        if self._next:
            self._embedding_change = self._change_in_embedding(model, at.tokens)
            logits, changed = (model.head(states)[0] for states in self._pair)
            if logits.dim() == 2 and len(logits) == self._pair[0].shape[-2]:
                self._logits_change = self._relative_change(logits.double(), changed.double())
        self._assumed = getattr(model, "assumes_hidden_tokens", False)

    def _change_in_embedding(self, model: Model, tokens: Tensor) -> float:
        """The change of earlier rows of X_0 with another last token."""
        # a model may read tokens of its own beside those of the text
        if self._last >= tokens.shape[-1]:
            return 0.0
        others = tokens[tokens != tokens[0, self._last]]
        if not self._last or not len(others):
            return 0.0
        changed = tokens.clone()
        changed[0, self._last] = others[0]
        with torch.no_grad():
            x0 = model.embed(changed)
        return self._relative_change(self._x0[0].double(), x0[0].double())

    def figures(self) -> Readings:
        k, apart = self._differs or (0, 0.0)
        self.add(
            "difference of two passes",
            apart / self._rounding,
            f"a second pass of the same text differs by {apart:.2g} of the state",
            k,
        )
        if self._assumed and not self._next:
            self.add(
                "hidden tokens are a guess",
                1.0,
                "each token also reads later ones, and nothing says that the model fills in hidden"
                " tokens",
                place="the depth",
            )
        else:
            self.add(
                "hidden tokens are a guess", 0.0, "its loss is known, or named", place="the depth"
            )
        if self._differs:
            return self.found
        if not self._next or not self._changes:
            return self.found
        ratios = [change / self._rounding for change in self._changes]
        above = [k for k, ratio in enumerate(ratios) if ratio > 1]
        if self._embedding_change > self._rounding:
            self.add(
                "change by a later token",
                self._embedding_change / self._rounding,
                "with another last token alone, what the first block gets of earlier ones changes"
                f" by {self._embedding_change:.2g} of itself",
                place="before the depth",
            )
        elif not above and self._logits_change > self._rounding:
            self.add(
                "change by a later token",
                self._logits_change / self._rounding,
                "with another last token alone, logits of earlier ones change by"
                f" {self._logits_change:.2g} of themselves, and their states do not",
                place="between the depth and the logits",
            )
        elif not above:
            self.add(
                "change by a later token",
                max(ratios),
                "no earlier token's state changes with the last token's sign",
                place="the depth",
            )
        else:
            first = above[0]
            change = (
                f"{self._changes[first]:.2g} of themselves, {ratios[first]:.2g} times the limit"
            )
            self.add(
                "change by a later token",
                ratios[first],
                f"with another last token alone, states of earlier ones change by {change}",
                first,
            )
        return self.found


def follows(tokens: Any, targets: Any) -> bool:
    """Whether the targets, except those of -1, are the next tokens."""
    if not (
        isinstance(tokens, Tensor)
        and isinstance(targets, Tensor)
        and tokens.shape == targets.shape
        and tokens.dim() == 2
    ):
        return False
    counted = targets[:, :-1] >= 0
    return bool(counted.any()) and bool((targets[:, :-1] == tokens[:, 1:])[counted].all())
