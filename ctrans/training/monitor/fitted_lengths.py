"""The lengths h of steps X + h r that may be learned, as those of ReZero. They are fitted in each
pass: a length that was read when the monitor was made is another one after some steps.
"""

from __future__ import annotations

from torch import Tensor

from ctrans.measure.reductions import sample_rows


class FittedLengths:
    """h = <X' - X, r>/<r, r> of each sublayer k, X' = X + h r, over the first tokens of a pass.

    A model may change X and r in place, so copies are kept.
    """

    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {}
        self._velocities: dict[int, Tensor] = {}

    def enter(self, k: int, x: Tensor) -> None:
        """Takes the state X before sublayer k."""
        self._states[k] = sample_rows(x).clone()

    def move(self, k: int, r: Tensor) -> None:
        """Takes the raw velocity r of sublayer k."""
        self._velocities[k] = sample_rows(r).clone()

    def leave(self, k: int, total: Tensor) -> Tensor | None:
        """h of sublayer k from the sum X'; None if X or r was not seen, or is not its like."""
        x = self._states.pop(k, None)
        r = self._velocities.pop(k, None)
        rows = sample_rows(total)
        if x is None or r is None or not x.shape == r.shape == rows.shape:
            return None
        square = r.square().sum()
        product: Tensor = ((rows - x) * r).sum()
        return product / square.where(square > 0, 1.0)
