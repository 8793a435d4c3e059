"""Whether rows of attention are those by which a map reads tokens: other tokens must change rows
and outputs where such rows say so, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctrans.interop.tolerances import difference, tolerance


@dataclass(frozen=True)
class RowsAndOutputs:
    """Rows and the output of a map at states x, and where half of the tokens of the first sequence
    are others.
    """

    x: Tensor
    is_changed: Tensor
    rows: Tensor
    changed: Tensor
    output: Tensor
    changed_output: Tensor

    @property
    def _close(self) -> float:
        return max(tolerance(self.x.dtype), tolerance(self.rows.dtype))

    def weigh_tokens(self) -> bool:
        """Whether the output of token i in sequence s depends on others by row i of this sequence.

        Rows of changed tokens and outputs of other tokens must change. The rows of other sequences
        must not, nor may what the other tokens read of each other, up to a factor for each row:
        scores are of pairs of tokens. Rows of channels, of tokens in another order, or of heads
        before sequences do not pass this.
        """
        tokens = self.x.shape[1]
        if self.rows.shape[-1] != tokens or tokens < 3:
            return False
        close = self._close
        if len(self.x) > 1 and difference(self.changed[1:], self.rows[1:]) > close:
            return False
        kept = ~self.is_changed
        before, after = (each[0][:, kept][:, :, kept] for each in (self.rows, self.changed))
        reads = before.sum(-1, keepdim=True) > 0
        before = torch.where(reads, before / before.sum(-1, keepdim=True), 0.0)
        after = torch.where(reads, after / after.sum(-1, keepdim=True), 0.0)
        return (
            difference(after, before) <= close
            and self._rows_differ(close)
            and difference(self.changed_output[0, kept], self.output[0, kept]) > close
        )

    def weigh_others(self) -> bool:
        """Whether the output of token i in sequence s depends on another sequence by row i of s:
        rows and outputs of changed tokens must change, and no others.
        """
        if self.x.shape[1] < 2:
            return False
        close = self._close
        which = self.is_changed
        expected = self.rows.clone()
        expected[0][:, which] = self.changed[0][:, which]
        expected_output = self.output.clone()
        expected_output[0, which] = self.changed_output[0, which]
        return (
            difference(self.changed, expected) <= close
            and difference(self.changed_output, expected_output) <= close
            and self._rows_differ(close)
            and difference(self.changed_output[0, which], self.output[0, which]) > close
        )

    def _rows_differ(self, close: float) -> bool:
        """Whether each changed token's rows differ in a head, but for those that read one token."""
        rows = self.rows[0][:, self.is_changed]
        changed = self.changed[0][:, self.is_changed]
        reads_more = (rows > close).sum(-1) > 1  # a mask may add a finite number
        differs = (changed - rows).abs().amax(-1) > close * rows.amax(-1)
        return bool((differs.any(0) | ~reads_more.any(0)).all())


def with_other_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """The states with other numbers in half of the tokens of the first sequence, and which."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))
    is_changed = (order < x.shape[1] // 2).to(x.device)
    others = x.clone()
    others[0, is_changed] = -others[0, is_changed].flip(-1)
    return others, is_changed
