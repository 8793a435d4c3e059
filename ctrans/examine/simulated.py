"""What `ctrans simulate` measures of a model, as one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.control.action import Action
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.examine.simulated_measures import ROUNDING
from ctrans.examine.simulated_spectra import of_products
from ctrans.measure.backward.token_exponents import TokenExponents
from ctrans.measure.findings import Mark
from ctrans.measure.forward.contributions import ContributionsByDepth
from ctrans.measure.forward.euler_limit import EulerLimit
from ctrans.measure.forward.simulation import Simulation
from ctrans.measure.forward.spectra import SpectrumFigures
from ctrans.measure.measured import Answer, Measured, Value, along_depth
from solvers import Status

LARGE = 10.0
"""Growth by more than this factor, or shrinking, is noted."""
NEAR = 0.1
"""A discrete model is near its ODE if their states differ by at most this share."""
CLOSE = 0.05
"""A slope of the Euler limit that is farther from 1 than this is noted."""
UNDOING = 0.1
"""Sublayers are said to undo each other if their displacements' cosine is below minus this."""
NO_SPECTRA = "no map of this model gives access to its heads or its matrices"


@dataclass(frozen=True)
class Simulated:
    """A simulation of a model, with the analyses that the user asked for.

    - `words`: the texts of the tokens of `lyapunov`
    """

    simulation: Simulation
    lyapunov: TokenExponents | None = None
    words: Sequence[str] = ()
    spectra: Sequence[SpectrumFigures] | None = None
    contributions: ContributionsByDepth | None = None
    action: Action | None = None

    def values(self, model: str) -> Iterator[Value]:
        """The rows of the table."""
        yield from _values(model, self.simulation)
        if self.simulation.euler_limit is not None:
            yield from _of_the_limit(model, self.simulation.euler_limit)
        if self.action is not None:
            yield from _of_the_action(model, self.action)
        if self.lyapunov is not None:
            yield from _of_tokens(model, self.lyapunov, self.words)
        if self.spectra:
            yield from of_products(model, self.spectra)
        if self.contributions is not None:
            yield from _of_parts(model, self.contributions)

    @property
    def missing(self) -> dict[str, str]:
        """What was not measured, and why."""
        simulation = self.simulation
        reasons: dict[str, str] = {}
        if simulation.bounds is not None:
            reasons |= simulation.bounds.missing
        reasons |= simulation.missing
        some_distance = _largest(simulation.discrete_distance) is not None
        if "distance to the ODE" in reasons and some_distance:
            reasons["distance to the ODE"] = (
                "the ODE to compare with could not be solved to the end, so that distances end"
                f" early: {reasons['distance to the ODE']}"
            )
        if simulation.euler_limit is not None:
            reasons |= simulation.euler_limit.missing
        if self.action is not None:
            reasons |= self.action.missing
        if self.contributions is not None:
            reasons |= self.contributions.missing
        if self.spectra is not None and not self.spectra:
            reasons["largest singular value of QK"] = NO_SPECTRA
        return reasons

    @property
    def notes(self) -> list[str]:
        """Remarks for the reader."""
        simulation = self.simulation
        lines = list(simulation.warnings)
        lines += [
            self.missing[name] for name in ("bound", "distance to the ODE") if name in self.missing
        ]
        if simulation.euler_limit is not None:
            lines += _far_from_the_limit(simulation.euler_limit)
        if self.contributions is not None:
            lines += self.contributions.missing.values()
        return lines

    @property
    def reasons(self) -> list[str]:
        """The model's step, what it conserves, and which sublayers undo each other."""
        simulation = self.simulation
        lines: list[str] = []
        placement = PLACEMENTS.get(simulation.placement)
        if placement is None:
            lines.append(f"sublayers differ in their placement: {simulation.placement}")
        else:
            lines.append(f"a step of the model is {placement.step}, with v = {placement.velocity}")
        if simulation.law:
            lines.append(f"conserved: {simulation.law}")
        if self.action is not None:
            lines += _undoing(self.action)
        return lines


def measured(models: Mapping[str, Simulated]) -> Measured:
    """The table of several models."""
    return Measured(
        values=tuple(value for name, model in models.items() for value in model.values(name)),
        missing={name: model.missing for name, model in models.items() if model.missing},
        answers=(answer({name: model.simulation for name, model in models.items()}),),
        notes={name: model.notes for name, model in models.items() if model.notes},
        reasons={name: model.reasons for name, model in models.items()},
        styles={name: model.simulation.placement for name, model in models.items()},
    )


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a simulation's JSON of version 1. Raises ConfigError for another object."""
    models = result["placements"]
    return measured({name: simulated_in(model) for name, model in models.items()})


def simulated_in(model: Mapping[str, Any]) -> Simulated:
    """A model of a simulation's JSON of version 1. Raises ConfigError for another object."""
    lyapunov = model.get("lyapunov")
    texts: Sequence[str] = ()
    if isinstance(lyapunov, Mapping):
        texts = lyapunov.get("words", ())
    analyses = from_json(_Analyses, model)
    return Simulated(
        from_json(Simulation, model),
        analyses.lyapunov,
        texts,
        analyses.spectra,
        analyses.contributions,
        analyses.action,
    )


@dataclass(frozen=True)
class _Analyses:
    lyapunov: TokenExponents | None = None
    spectra: list[SpectrumFigures] | None = None
    contributions: ContributionsByDepth | None = None
    action: Action | None = None


def answer(simulations: Mapping[str, Simulation]) -> Answer:
    """How far the states grow against their bound, how well the conserved quantity holds, and how
    far the discrete models are from their ODEs.
    """
    failed = [
        name for name, simulation in simulations.items() if simulation.status is not Status.SUCCESS
    ]
    if failed:
        broken = ", ".join(failed)
        return Answer(f"The solution broke off before the end of the depth: {broken}.", "bad")
    factors = {}
    for name, simulation in simulations.items():
        sizes = [size for size in simulation.mean_abs if math.isfinite(size)]
        if sizes and sizes[0] > 0:
            factors[name] = sizes[-1] / sizes[0]
    if not factors:
        return Answer("The hidden states could not be measured.", "note")
    text = f"Through the depth the hidden states change in size by a factor of {_range(factors)}"
    above = [name for name, simulation in simulations.items() if _exceeds(simulation)]
    if above:
        where = ", ".join(above)
        return Answer(
            f"{text}, which exceeds the bound of the exact solution ({where}): the method takes too"
            " few steps.",
            "bad",
        )
    shares = _largest_of(simulations, lambda simulation: (simulation.used or [])[1:])
    if shares:
        text += f", and use at most {max(shares.values()):.0%} of their bound"
    sentences = [f"{text}."]
    drifts = _largest_of(simulations, lambda simulation: simulation.drift)
    if drifts:
        sentences.append(
            f"What the placement conserves holds to {max(drifts.values()):.1g} of its size."
        )
    sentences += _about_the_ode(simulations)
    moderate = all(1 / LARGE <= factor <= LARGE for factor in factors.values())
    mark: Mark = "note"
    if moderate:
        mark = "good"
    return Answer(" ".join(sentences), mark)


def _largest_of(
    simulations: Mapping[str, Simulation],
    series: Callable[[Simulation], Sequence[float | None] | None],
) -> dict[str, float]:
    """The largest figure of a series of each model that has one."""
    largest = {name: _largest(series(simulation)) for name, simulation in simulations.items()}
    return {name: figure for name, figure in largest.items() if figure is not None}


def _about_the_ode(simulations: Mapping[str, Simulation]) -> Iterator[str]:
    """How far the discrete models are from their ODEs, and with how many steps the farthest one is
    near.
    """
    distances = _largest_of(
        simulations, lambda simulation: (simulation.discrete_distance or [])[-1:]
    )
    if not distances:
        return
    nearest = min(distances, key=distances.__getitem__)
    farthest = max(distances, key=distances.__getitem__)
    apart = f"{100 * distances[farthest]:.3g}%"
    limit = simulations[farthest].euler_limit
    enough = "" if distances[farthest] <= NEAR else _with_more_steps(limit)
    of_it = ""
    if enough:
        of_it = f"; that of {farthest}{enough[1:]}"
    if len(distances) == 1:
        yield (
            "With one Euler step per sublayer the Transformer's last state differs from its exact"
            f" ODE's by {apart}{enough}."
        )
    else:
        yield (
            "With one Euler step per sublayer the Transformers' last states differ from their exact"
            f" ODEs' by {100 * distances[nearest]:.2g}% ({nearest}) to {apart} ({farthest}){of_it}."
        )


def _with_more_steps(limit: EulerLimit | None) -> str:
    """How near the fewest steps come that come near, or the most that were tried."""
    if limit is None or len(limit.steps) == 1:
        return ""
    errors = dict(zip(limit.steps, limit.errors, strict=True))
    near = [steps for steps, error in errors.items() if error <= NEAR]
    steps = near[0] if near else limit.steps[-1]
    return f", with {steps} steps by {100 * errors[steps]:.2g}%"


def _range(factors: Mapping[str, float]) -> str:
    low = min(factors, key=factors.__getitem__)
    high = max(factors, key=factors.__getitem__)
    if len(factors) == 1:
        return f"{factors[low]:.3g}"
    return f"{factors[low]:.3g} ({low}) to {factors[high]:.3g} ({high})"


def _exceeds(simulation: Simulation) -> bool:
    """Whether a state is larger than the bound on it."""
    shares = [share for share in simulation.used or () if math.isfinite(share)]
    return max(shares, default=0.0) > 1 + ROUNDING


def _largest(values: Sequence[float | None] | None) -> float | None:
    finite = [value for value in values or () if value is not None and math.isfinite(value)]
    return max(finite, default=None)


def _values(model: str, simulation: Simulation) -> Iterator[Value]:
    outcome = "yes"
    if simulation.status is not Status.SUCCESS:
        outcome = simulation.message
    yield Value(model, "solved to the end", None, words=outcome)
    yield Value(model, "size at the start", simulation.mean_abs[0])
    yield Value(model, "size at the end", simulation.mean_abs[-1])
    largest = {
        # before the first segment it is 100% by definition
        "largest share of the bound": _largest((simulation.used or [])[1:]),
        "largest conservation error": _largest(simulation.drift),
        "distance to the ODE at the end": _largest((simulation.discrete_distance or [])[-1:]),
    }
    for measure, figure in largest.items():
        if figure is not None:
            yield Value(model, measure, figure)
    yield Value(model, "evaluations", simulation.evaluations)
    yield Value(model, "accepted steps", simulation.accepted)
    yield Value(model, "rejected steps", simulation.rejected)
    series: dict[str, Sequence[float | None] | None] = {
        "times": simulation.times,
        "mean_abs": simulation.mean_abs,
        "bound": None,
        "paper's bound": None,
        "variance": simulation.variance,
        "bound of the variance": None,
        "paper's bound of the variance": None,
        "rms": simulation.rms,
        "bound of the root mean square": None,
        "common": simulation.common,
        "share of the bound": simulation.used,
        "distance to the ODE": simulation.discrete_distance,
        "error of the method": None,
    }
    bounds = simulation.bounds
    if bounds is not None:
        series["bound"] = bounds.mean_abs
        series["paper's bound"] = bounds.seed_mean_abs
        series["bound of the variance"] = bounds.variance
        series["paper's bound of the variance"] = bounds.seed_variance
        series["bound of the root mean square"] = bounds.rms
    if not simulation.discrete:
        series["error of the method"] = simulation.distance
    for measure, figures in series.items():
        yield from along_depth(model, measure, figures or ())
    yield from along_depth(model, "conservation error", simulation.drift or (), start=1)


def _of_the_limit(model: str, limit: EulerLimit) -> Iterator[Value]:
    if limit.slope is not None:
        yield Value(model, "slope of the Euler limit", limit.slope)
    first = limit.first_point
    yield Value(model, "error of the discrete model", limit.errors[0], words=first)
    for steps, error in zip(limit.steps, limit.errors, strict=True):
        words = ""
        if steps == 1:
            words = first
        yield Value(model, "error of more Euler steps", error, step=steps, words=words)


def _far_from_the_limit(limit: EulerLimit) -> Iterator[str]:
    """A remark where the slope is not the 1 of theory."""
    if limit.slope is not None and abs(limit.slope - 1) > CLOSE:
        yield (
            f"with {limit.fitted[0]} to {limit.fitted[-1]} Euler steps a sublayer the error falls"
            f" with slope {limit.slope:.2f}, not 1: these steps are too large for this ODE"
        )


def _of_the_action(model: str, action: Action) -> Iterator[Value]:
    figures = {
        "straightness": action.straightness,
        "action": action.action,
        "squared displacement": action.displacement,
        "W_2^2 of the tokens": action.transport,
        "least straightness of a token": action.least_straight,
    }
    for measure, figure in figures.items():
        if figure is not None:
            yield Value(model, measure, figure)
    if action.opposed is not None:
        pair = " and ".join(action.names[k] for k in action.opposed)
        yield Value(model, "opposed sublayers", action.cosine, words=pair)
    yield from along_depth(model, "share of the displacement", action.shares)


def _undoing(action: Action) -> Iterator[str]:
    """A remark on the two sublayers that undo each other most, if they do by more than a little."""
    if action.opposed is not None and (action.cosine or 0.0) < -UNDOING:
        first, second = (action.names[k] for k in action.opposed)
        yield (
            f"sublayers {first} and {second} undo each other most: the cosine of their"
            f" displacements is {action.cosine:.2f}"
        )


def _of_tokens(model: str, lyapunov: TokenExponents, texts: Sequence[str]) -> Iterator[Value]:
    exponents = zip(lyapunov.tokens, lyapunov.exponents, strict=True)
    for position, (token, exponent) in enumerate(exponents):
        text = str(token)
        if position < len(texts):
            text = texts[position]
        yield Value(model, "token exponent", exponent, step=position, place=text)


def _of_parts(model: str, contributions: ContributionsByDepth) -> Iterator[Value]:
    series = {
        "share of the last state": contributions.state,
        "size of a part": contributions.size,
        "added to the target's logit": contributions.logit or [],
    }
    for measure, figures in series.items():
        for part, figure in enumerate(figures):
            yield Value(model, measure, figure, step=part, place=contributions.names[part])
