"""The instruments of `ctrans diagnose`, as the table of measures names them."""

from __future__ import annotations

import numbers
from collections.abc import Iterator

from torch import Tensor

from ctrans.examine.diagnosis.reading import DiagnosticInstrument
from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.walk import Instrument, StepContext
from solvers import ConfigError
from solvers.errors import shown

TOPIC = "diagnosis"


def instruments() -> dict[str, Instrument]:
    """An instrument of each kind that a measure names, and one for the measures that are plain
    functions, by name.
    """
    kinds = dict.fromkeys(
        kind
        for measure in MEASURES.values()
        for kind in _computes(measure)
        if isinstance(kind, type) and issubclass(kind, Instrument)
    )
    by_name = {getattr(kind, "name", "") or kind.__name__: kind() for kind in kinds}
    return {**by_name, PlainMeasures.name: PlainMeasures()}


def _computes(measure: Measure) -> tuple[object, ...]:
    if isinstance(measure.compute, tuple):
        return measure.compute
    return (measure.compute,)


class PlainMeasures(DiagnosticInstrument):
    """The measures of states X_k and raw velocities r_k that are plain functions and have a limit
    here. A monitor hands over the same.
    """

    name = "plain measures"

    def start(self, x0: Tensor) -> None:
        self._look("state", x0, None, "the embedded text")

    def forward(self, at: StepContext) -> None:
        self._look("state", at.y, at.k)
        # Evaluated anew, and only for a measure of it: behind a state norm, X_k and X_(k+1) do not
        # tell r.
        if any(plain_measures("sublayer")):
            self._look("sublayer", at.sublayer(at.entered), at.k)

    def _look(self, scope: str, tensor: Tensor, segment: int | None, location: str = "") -> None:
        for name, measure in plain_measures(scope):
            value = _number(name, measure, tensor)
            self.add(name, value, f"{MEASURES.title(name)} = {value:.3g}", segment, location)


def plain_measures(scope: str) -> Iterator[tuple[str, Measure]]:
    """The measures of that scope that are plain functions and that a diagnosis judges."""
    for name, measure in MEASURES.items():
        judged = any(TOPIC in check.topics for check in measure.checks.values())
        plain = callable(measure.compute) and not isinstance(measure.compute, type)
        if measure.scope == scope and judged and plain:
            yield name, measure


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
