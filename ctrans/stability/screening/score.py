"""The stability score of an architecture: how every step's measured exponents and decades become one number in [0, 1]."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping


def ingredient_score(k: float) -> float:
    """1/(1 + max(k, 0)): 1 where nothing grows, 1/2 for growth like the first power or by a factor of 10, 0 for k = inf."""
    return 1 / (1 + max(k, 0.0))


def geometric_mean(scores: Iterable[float]) -> float | None:
    """(prod s_i)^(1/n); 0 where one is 0, None of none."""
    values = list(scores)
    return math.prod(values) ** (1 / len(values)) if values else None


def step_score(ingredients: Mapping[str, float]) -> float | None:
    """The geometric mean of 1/(1 + max(k, 0)) over a step's known ingredients k; None where none is known.

    Each k is an exponent in the size of the weights, or decades over the depth of the model. nan is not known.
    """
    return geometric_mean(ingredient_score(k) for k in ingredients.values() if not math.isnan(k))


@dataclasses.dataclass(frozen=True)
class Score:
    """The geometric mean `value` of the steps' scores, `steps`, and what was not known: `missing` names steps without a score, and
    ingredients as "step: ingredient".

    The value is of what is known, and compares only with scores that lack the same.
    """

    value: float | None
    steps: dict[str, float]
    missing: list[str]


def overall(steps: Mapping[str, Mapping[str, float]]) -> Score:
    """From every step's ingredients. Each step weighs the same, however many it has; one with score 0 makes the whole 0."""
    scores = {name: step_score(ingredients) for name, ingredients in steps.items()}
    known = {name: score for name, score in scores.items() if score is not None}
    missing = [name for name in steps if name not in known]
    missing += [f"{name}: {what}" for name in known for what, k in steps[name].items() if math.isnan(k)]
    return Score(geometric_mean(known.values()), known, missing)


def decades(ratio: float) -> float:
    """log10 of a ratio: -inf for 0, inf where it is infinite or not a number, since a state that overflowed has run away."""
    return math.inf if not ratio < math.inf else math.log10(ratio) if ratio > 0 else -math.inf
