"""The instruments of `ctrans diagnose`. A new one is an entry of `INSTRUMENTS`."""

from __future__ import annotations

from collections.abc import Callable

from ctrans.examine.diagnosis import weight_readings
from ctrans.examine.diagnosis.forward_instruments import (
    BlockMoves,
    DeadUnits,
    EmbeddingShare,
    EpsShare,
    GainsByNorm,
    HeadRows,
    ScoreSpread,
    StatesByDepth,
    SublayerMoves,
    ZeroHeads,
)
from ctrans.examine.diagnosis.future_tokens import ReadsAhead
from ctrans.examine.diagnosis.loss_instruments import (
    CostatesByDepth,
    DecayOverThreshold,
    Logits,
    LossOfLess,
    TiedGradients,
)
from ctrans.measure.findings import Check
from ctrans.measure.walk import Instrument

INSTRUMENTS: dict[str, Callable[[], Instrument]] = {
    "gains": GainsByNorm,
    "states": StatesByDepth,
    "what blocks do": BlockMoves,
    "heads": HeadRows,
    "scores": ScoreSpread,
    "heads of zeros": ZeroHeads,
    "units": DeadUnits,
    "eps": EpsShare,
    "embedding": EmbeddingShare,
    "what sublayers add": SublayerMoves,
    "logits and loss": Logits,
    "costates": CostatesByDepth,
    "loss of less": LossOfLess,
    "tied weights": TiedGradients,
    "what tokens read": ReadsAhead,
}
"""Instruments by name. Each has readings of the quantities that its class `offers`."""
_OWN = (*weight_readings.OFFERS, *DecayOverThreshold.offers, "sensitivity")


def offered(check: Check) -> bool:
    """Whether an instrument of a diagnosis offers the check's quantity."""
    return check.quantity in _OWN or any(
        check.quantity in getattr(each, "offers", ()) for each in INSTRUMENTS.values()
    )
