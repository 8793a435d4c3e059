"""What a diagnosis asks of a model that predicts the next token: whether a token reads those that
it has to predict.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctrans.depth import Depth
from ctrans.findings import Readings
from ctrans.stability.diagnosis.reading import DiagnosticInstrument
from ctrans.walk import Model, StepContext, Turn
from solvers.run import finite


class ReadsAhead(DiagnosticInstrument):
    """r_k = max over tokens i < N of |X'_i - X_i|/|X_i| behind segment k, X' with -x_N in place of
    the last token's x_N in X_0.

    Both go side by side in one batch, so that what is equal in exact arithmetic is rounded alike.

    In a causal model r_k is 0, but for rounding: what is read is r_k/sqrt(eps), eps the precision
    of the states, 1e-7 in float32. Of the first sequence, and only where the targets are the tokens
    that follow: to predict hidden tokens both sides are read on purpose. The segment at which r_k
    is first above 1 is named. No reading of a single token. Not seen are tokens that read others
    ahead but not the last, maps that cannot tell x_N from -x_N, and what is below the root of the
    precision: in bfloat16 a change of 9%.
    """

    offers = ("change by a later token",)

    def begin(self, depth: Depth, x0: Tensor) -> None:
        super().begin(depth, x0)
        self._next = False
        text = torch.ones(x0.shape[-2], dtype=torch.bool) if self.kept is None else self.kept[0]
        self._last = int(text.nonzero().max()) if text.any() else 0
        self._pair = torch.cat([x0[:1], x0[:1]])
        self._pair[1, self._last] *= -1
        self._rounding, self._changes = torch.finfo(x0.dtype).eps ** 0.5, list[float]()

    def forward(self, at: StepContext) -> None:
        self._pair = at.sublayer.step(self._pair, at.h)
        one, other = self._pair[:, : self._last].double()
        if one.numel() and finite(one) and finite(other):
            size = torch.linalg.vector_norm(one, dim=-1).clamp(min=torch.finfo(one.dtype).tiny)
            change = float((torch.linalg.vector_norm(other - one, dim=-1) / size).max())
            self._changes.append(change)

    def head(self, model: Model, at: Turn) -> None:
        self._next = _following(at.tokens, at.targets)

    def figures(self) -> Readings:
        if not self._next or not self._changes:
            return {}
        r = [change / self._rounding for change in self._changes]
        k = next((k for k, each in enumerate(r) if each > 1), None)
        if k is None:
            self.add(self.offers[0], max(r), "no earlier token's state changes with the last token's sign", place="the depth")
        else:
            change = f"{self._changes[k]:.2g} of themselves, {r[k]:.2g} times the limit"
            self.add(self.offers[0], r[k], f"with another last token alone, states of earlier ones change by {change}", k)
        return self.found


def _following(tokens: Any, targets: Any) -> bool:
    """Whether the targets are the tokens that follow, but for those left out."""
    if not (isinstance(tokens, Tensor) and isinstance(targets, Tensor) and tokens.shape == targets.shape and tokens.dim() == 2):
        return False
    known = targets[:, :-1] != -1
    return bool(known.any()) and bool((targets[:, :-1] == tokens[:, 1:])[known].all())
