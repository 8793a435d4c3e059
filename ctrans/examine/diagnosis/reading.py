"""Base of the diagnosis' instruments: readings of quantities by place, and a place in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ctrans.dynamics.depth import Depth
from ctrans.measure.findings import Reading, Readings
from ctrans.measure.walk import Instrument

WORDS = {"attention": "attention", "ffn": "FFN", "parallel": "attention and FFN", "part": "part"}
NAMED = 4
"""Number of channels or heads that a text names; it counts the rest."""


class DiagnosticInstrument(Instrument):
    """An instrument with readings of measures.

    `name` stands for it where a figure could not be measured.
    """

    name: ClassVar[str] = ""
    found: Readings

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self.depth = depth
        self.found = Readings()
        self.start(x0)

    def start(self, x0: Tensor) -> None:
        """Sets what the passes collect, before the first segment. X_0 is the embedded text."""

    def add(
        self, quantity: str, value: float, figure: str, segment: int | None = None, place: str = ""
    ) -> None:
        """Adds a reading. The default place is that of the segment."""
        location = place or place_of(self.depth, segment or 0)
        self.found.setdefault(quantity, []).append(Reading(value, location, figure, segment))


def place_of(depth: Depth, k: int) -> str:
    """Segment k in words: "block 5, FFN (segment 11)". Blocks and segments count from 0."""
    kind = depth.sublayers[k].kind
    return f"{depth.unit} {k // depth.per_block}, {WORDS.get(kind, kind)} (segment {k})"


def rms(x: Tensor) -> float:
    """The root mean square of all entries, in float64."""
    return float(x.detach().double().square().mean().sqrt())


def named(texts: Sequence[str]) -> str:
    """The first few, and the number of the rest."""
    more = ""
    if len(texts) > NAMED:
        more = f" and {len(texts) - NAMED} more"
    return ", ".join(texts[:NAMED]) + more


def cut(x: Any, sequences: int, tokens: int) -> Any:
    """The first sequences, and of token ids the first tokens. Images and features keep all
    tokens, and what is no tensor, such as the targets of a loss that reads none, stays.
    """
    if not isinstance(x, Tensor):
        return x
    if x.dim() == 2 and not x.is_floating_point():
        return x[:sequences, :tokens]
    return x[:sequences]
