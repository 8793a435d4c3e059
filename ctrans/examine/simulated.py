"""What `ctrans simulate` measures of a model, as one table.

The table of measures has the figures along the depth here, with those of the optional analyses:
exponents of tokens, spectra of matrix products, and what each sublayer contributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.backward.token_exponents import TokenExponents
from ctrans.measure.findings import Mark
from ctrans.measure.forward.contributions import ContributionsByDepth
from ctrans.measure.forward.euler_limit import EulerLimit
from ctrans.measure.forward.simulation import Simulation
from ctrans.measure.forward.spectra import SpectrumFigures
from ctrans.measure.measured import Answer, Measured, Value, along_depth
from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.state_measures import root_mean_square as root_mean_square  # and its entries
from solvers import Status

ROUNDING = 1e-9
"""A share of a bound above 1 by less than this is rounding."""
LARGE = 10.0
"""Growth by more than this factor, or shrinking, is noted."""
_SHARE = "mean |x| over its bound; above 100% the method takes too few steps"
_CONSERVED = "departure from the quantity that this placement conserves"
_APART = (
    "|X_discrete - X_ODE| / |X_ODE|: how far the Transformer, one Euler step a sublayer, is from"
    " the ODE that it discretises. This is no error of the model: it measures how well a continuous"
    " depth describes it"
)
CLOSE = 0.05
"""A slope of the Euler limit that is farther from 1 than this is noted."""
NO_SPECTRA = "no map of this model gives access to its heads or its matrices"

_LIMIT = "The Euler limit"
MEASURES.add(
    "ctrans.simulate",
    {
        "solved to the end": Measure(formula="whether the solution reached the end of the depth"),
        "size at the start": Measure(
            formula="mean |X_0| over entries, before the first layer", unit="mean |x|"
        ),
        "size at the end": Measure(
            formula="mean |X_T| over entries, after the last layer", unit="mean |x|"
        ),
        "largest share of the bound": Measure(
            formula=_SHARE, title="share of the bound", share=True, marked=1 + ROUNDING
        ),
        "largest conservation error": Measure(formula=_CONSERVED, title="conservation error"),
        "largest distance to the ODE": Measure(formula=_APART, title="distance to the ODE"),
        "evaluations": Measure(formula="evaluations of a velocity", detail=True),
        "accepted steps": Measure(formula="steps of the method that were accepted", detail=True),
        "rejected steps": Measure(formula="steps of the method that were rejected", detail=True),
        "bound": Measure(
            formula="the most that theory allows mean |x| to be",
            unit="mean |x|",
            scope="state",
            source="Kan, theorems of section 4, sharpened (THEORY.md, section 6)",
            bounds="mean_abs",
        ),
        "paper's bound": Measure(
            formula="bound on mean |x| as the paper prints it",
            unit="mean |x|",
            scope="state",
            source="Kan, section 4",
            detail=True,
        ),
        "bound of the variance": Measure(
            formula="the most that theory allows the variance to be",
            unit="variance",
            scope="state",
            source="THEORY.md, section 6",
            bounds="variance",
        ),
        "paper's bound of the variance": Measure(
            formula="bound on the variance as the paper prints it",
            unit="variance",
            scope="state",
            source="Kan, section 4",
            detail=True,
        ),
        "bound of the root mean square": Measure(
            formula="the most that theory allows the root mean square to be",
            unit="|X_k|/sqrt(number of entries)",
            scope="state",
            source="THEORY.md, section 6",
            bounds="rms",
            detail=True,
        ),
        "share of the bound": Measure(
            formula=_SHARE, unit="share", scope="state", share=True, detail=True
        ),
        "conservation error": Measure(formula=_CONSERVED, scope="state", detail=True),
        "distance to the ODE": Measure(
            formula=_APART,
            title="the discrete model and its ODE",
            unit="|X_discrete − X_ODE| / |X_ODE|",
            scope="state",
        ),
        "error of the method": Measure(
            formula="relative distance of the chosen method's solution from the ODE's",
            unit="|X − X_ODE| / |X_ODE|",
            scope="state",
            detail=True,
        ),
    },
)
MEASURES.add(
    "ctrans.simulate",
    {
        "slope of the Euler limit": Measure(
            formula=(
                "p of error ~ n^-p (1 + c/n), n Euler steps a sublayer: a fit to the last four n"
                " (three if there are no more). In theory 1"
            ),
            title="slope",
            decimals=2,
            topic=_LIMIT,
            source="THEORY.md, section 2",
        ),
        "error of the discrete model": Measure(
            formula="|X_1 - X_ODE|/|X_ODE| at the end of the depth, n = 1",
            title="error at n = 1",
            topic=_LIMIT,
        ),
        "error of more Euler steps": Measure(
            formula=(
                "|X_n - X_ODE|/|X_ODE| at the end of the depth, n Euler steps a sublayer. n = 1 is"
                " the model's own step: with a norm around the state Euler and then the norm, while"
                " the others are Euler steps of the ODE on the norm's image. Dashes: slope -1, an"
                " error proportional to 1/n"
            ),
            title="more Euler steps tend to the ODE",
            unit="|X_n − X_ODE| / |X_ODE|",
            scope="size",
            over="Euler steps a sublayer, n",
            log_x=True,
            slope=-1.0,
        ),
    },
)
MEASURES.add(
    "ctrans simulate --lyapunov",
    {
        "token exponent": Measure(
            formula=(
                "log|dX_T[last]/dX_0[j]|/T of each input token j. Red: a small change of the token"
                " grows on its way to the last token's state. Blue: it decays. Grey: it does not"
                " get there"
            ),
            title="growth rate of a small change of each input token",
            unit="1/depth-time",
            scope="token",
        ),
    },
)
for _product, _words in (
    ("QK", "Q'K of a head"),
    ("OV", "O V of a head"),
    ("W_2 W_1", "W_2 W_1 of an FFN or expert"),
):
    MEASURES.add(
        "ctrans simulate --spectra",
        {
            f"largest singular value of {_product}": Measure(
                formula=f"sigma_max of {_words}, largest over heads or experts", scope="sublayer"
            ),
            f"largest eigenvalue of {_product}": Measure(
                formula=f"|lambda|_max of {_words}, largest over heads or experts",
                scope="sublayer",
            ),
            f"positive share of {_product}": Measure(
                formula=(
                    "share of the eigenvalues' sizes that those with positive real part have, of"
                    f" {_words}, mean over heads"
                ),
                unit="share",
                scope="sublayer",
                share=True,
                log=False,
            ),
            f"real part of {_product}": Measure(
                formula=f"real parts of the eigenvalues of {_words}",
                unit="real part",
                scope="weight",
                detail=True,
            ),
            f"eigenvalues of {_product}": Measure(
                formula=f"eigenvalues of {_words} in the complex plane, all heads or experts",
                unit="imaginary part",
                scope="weight",
                against=f"real part of {_product}",
            ),
        },
        picture="spectra",
    )
_PARTS = "embedding, sublayers in order, offsets"
MEASURES.add(
    "ctrans simulate --contributions",
    {
        "share of the last state": Measure(
            formula="<part, X>/|X|^2, mean over tokens: the shares sum to 1",
            scope="size",
            over=_PARTS,
            log=False,
            drawn="bars",
        ),
        "size of a part": Measure(
            formula="|part|/|X|, relative to the last state", scope="size", over=_PARTS, detail=True
        ),
        "added to the target's logit": Measure(
            formula="of the target, less the mean logit: the parts sum to it",
            scope="size",
            over=_PARTS,
            log=False,
            drawn="bars",
        ),
    },
    picture="contributions",
)


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

    def values(self, model: str) -> Iterator[Value]:
        """The rows of the table."""
        yield from _values(model, self.simulation)
        if self.simulation.euler_limit is not None:
            yield from _of_the_limit(model, self.simulation.euler_limit)
        if self.lyapunov is not None:
            yield from _of_tokens(model, self.lyapunov, self.words)
        if self.spectra:
            yield from _of_products(model, self.spectra)
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
        placement = PLACEMENTS.get(simulation.placement)
        if placement is None:
            lines.append(f"sublayers differ in their placement: {simulation.placement}")
        else:
            lines.append(f"a step of the model is {placement.step}, with v = {placement.velocity}")
        if simulation.law:
            lines.append(f"conserved: {simulation.law}")
        if simulation.euler_limit is not None:
            lines += _far_from_the_limit(simulation.euler_limit)
        if self.contributions is not None:
            lines += self.contributions.missing.values()
        return lines


def measured(models: Mapping[str, Simulated]) -> Measured:
    """The table of several models."""
    return Measured(
        values=tuple(value for name, model in models.items() for value in model.values(name)),
        missing={name: model.missing for name, model in models.items() if model.missing},
        answers=(answer({name: model.simulation for name, model in models.items()}),),
        notes={name: model.notes for name, model in models.items() if model.notes},
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
    )


@dataclass(frozen=True)
class _Analyses:
    lyapunov: TokenExponents | None = None
    spectra: list[SpectrumFigures] | None = None
    contributions: ContributionsByDepth | None = None


def answer(simulations: Mapping[str, Simulation]) -> Answer:
    """How far the states grow, and whether the solution can be trusted."""
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
    if any(simulation.bounds is not None for simulation in simulations.values()):
        text += ", within what theory allows"
    moderate = all(1 / LARGE <= factor <= LARGE for factor in factors.values())
    mark: Mark = "note"
    if moderate:
        mark = "good"
    return Answer(f"{text}.", mark)


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
        "largest distance to the ODE": _largest(simulation.discrete_distance),
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


def _of_tokens(model: str, lyapunov: TokenExponents, texts: Sequence[str]) -> Iterator[Value]:
    exponents = zip(lyapunov.tokens, lyapunov.exponents, strict=True)
    for position, (token, exponent) in enumerate(exponents):
        text = str(token)
        if position < len(texts):
            text = texts[position]
        yield Value(model, "token exponent", exponent, step=position, place=text)


def _of_products(model: str, spectra: Sequence[SpectrumFigures]) -> Iterator[Value]:
    groups: dict[tuple[int, str], list[SpectrumFigures]] = {}
    for spectrum in spectra:
        groups.setdefault((spectrum.segment, spectrum.product), []).append(spectrum)
    for (segment, product), parts in groups.items():
        singular = max(part.singular[0] for part in parts)
        radius = max(part.radius for part in parts)
        positive = sum(part.positive for part in parts) / len(parts)
        yield Value(model, f"largest singular value of {product}", singular, depth=segment)
        yield Value(model, f"largest eigenvalue of {product}", radius, depth=segment)
        yield Value(model, f"positive share of {product}", positive, depth=segment)
    for spectrum in spectra:
        name = f"segment {spectrum.segment}, part {spectrum.part}"
        for real, imaginary in zip(spectrum.real, spectrum.imaginary, strict=True):
            figures = {
                f"real part of {spectrum.product}": real,
                f"eigenvalues of {spectrum.product}": imaginary,
            }
            for measure, figure in figures.items():
                yield Value(
                    model,
                    measure,
                    figure,
                    depth=spectrum.segment,
                    head=spectrum.part,
                    place=name,
                )


def _of_parts(model: str, contributions: ContributionsByDepth) -> Iterator[Value]:
    series = {
        "share of the last state": contributions.state,
        "size of a part": contributions.size,
        "added to the target's logit": contributions.logit or [],
    }
    for measure, figures in series.items():
        for part, figure in enumerate(figures):
            yield Value(model, measure, figure, step=part, place=contributions.names[part])
