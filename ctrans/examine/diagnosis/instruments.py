"""The instruments of `ctrans diagnose`, as the table of measures names them."""

from __future__ import annotations

import numbers

from torch import Tensor

from ctrans.examine.diagnosis.reading import DiagnosticInstrument
from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.walk import Instrument, StepContext
from solvers import ConfigError
from solvers.errors import shown

TOPIC = "diagnosis"


def instruments() -> dict[str, Instrument]:
    """An instrument of each kind that a measure names, and one for each measure that is a plain
    function, by name.
    """
    kinds = dict.fromkeys(
        kind
        for measure in MEASURES.values()
        for kind in _computes(measure)
        if isinstance(kind, type) and issubclass(kind, Instrument)
    )
    by_name = {getattr(kind, "name", "") or kind.__name__: kind() for kind in kinds}
    plain = {name: PlainMeasure(name, measure) for name, measure in plain_measures().items()}
    return {**by_name, **plain}


def instrument_names(quantity: str) -> list[str]:
    """The names of the instruments that measure a quantity; none if a function does."""
    if quantity not in MEASURES:
        return []
    names = [getattr(kind, "name", "") for kind in _computes(MEASURES[quantity])]
    return [name for name in names if isinstance(name, str) and name]


def _computes(measure: Measure) -> tuple[object, ...]:
    if isinstance(measure.compute, tuple):
        return measure.compute
    return (measure.compute,)


class PlainMeasure(DiagnosticInstrument):
    """A measure of states X_k, or of raw velocities r_k, that is a plain function. A monitor hands
    over the same tensors.
    """

    def __init__(self, name: str, measure: Measure):
        self.measure_name = name
        self.measure = measure

    def start(self, x0: Tensor) -> None:
        if self.measure.scope == "state":
            self._look(x0, None, "the embedded text")

    def forward(self, at: StepContext) -> None:
        if self.measure.scope == "state":
            self._look(at.y, at.k)
        else:
            # Evaluated anew: behind a state norm, X_k and X_(k+1) do not tell r.
            self._look(at.sublayer(at.entered), at.k)

    def _look(self, tensor: Tensor, segment: int | None, location: str = "") -> None:
        name = self.measure_name
        value = _number(name, self.measure, tensor)
        self.add(name, value, f"{MEASURES.title(name)} = {value:.3g}", segment, location)


def plain_measures() -> dict[str, Measure]:
    """The measures that are plain functions and that a diagnosis judges, by name."""
    return {
        name: measure
        for name, measure in MEASURES.items()
        if measure.is_plain
        and measure.scope in ("state", "sublayer")
        and any(TOPIC in check.topics for check in measure.checks.values())
    }


def _number(name: str, measure: Measure, tensor: Tensor) -> float:
    """What the measure gives for that tensor. Raises ConfigError unless it is one number."""
    assert callable(measure.compute)
    value = measure.compute(tensor)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach().item()
    if not isinstance(value, numbers.Real):
        raise ConfigError(
            f"the function of the measure {name!r} gave {shown(value)} for a {measure.scope} of"
            f" shape {tuple(tensor.shape)}: return one number, such as the largest or the mean"
        )
    return float(value)
