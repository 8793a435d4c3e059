"""The quantities that `ctrans screen` measures, and their checks.

A quantity is *gauge-free* if all weights of the same function give the same figure. Five scalings
of weights do not change a Transformer:

- the last map times c before an output norm
- an input norm's gain times c, the next matrix divided by c
- W_V times c, W_O divided by c
- W_Q times c, W_K divided by c
- for ReLU, W_1 times c, W_2 divided by c

They are exact if a norm's eps is 0 or scaled too, and approximate for small eps. An optimiser's
step depends on them, so quantities of it are not gauge-free.

The limits are our choice, from the seven placements at initialisation. They are wide and not tested
against training runs. A screening does not rank models inside the limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ctrans.examine.diagnosis.forward_instruments import LEAST_ENTROPY
from ctrans.examine.diagnosis.shared_limits import (
    COLLAPSED,
    GUESSING,
    LOSS_EXCESS,
    MOST_SIMILAR,
    SATURATED,
    WORST_EXCESS,
)
from ctrans.measure.findings import OURS, Check, Checks, Finding, Reading, Severity

MOST_DECIMALS = 1000.0
"""From this size on, a value has three digits instead of fixed decimals."""
STEP = (
    "a step is taken in the weights: with W times c the gradient is divided by c, so SGD's step"
    " moves the function by 1/c^2 and Adam's by 1/c as much"
)
_CURVATURE = f"curvature is a second derivative by the weights, and {STEP}"


@dataclass(frozen=True)
class Quantity:
    """A measured figure: its formula in words, and its format.

    - `gauge`: empty for a gauge-free quantity, else the reason why it is not
    - `decimals`: number of decimals, for exponents and similar figures; None for three digits
    - `share`: whether to show it in per cent
    """

    description: str
    gauge: str = ""
    decimals: int | None = None
    share: bool = False

    def shown(self, value: float, error: float | None = None) -> str:
        """The value as text, with its error if given."""
        if math.isnan(value):
            return "unknown"
        if self.share:
            return f"{value:.0%}"
        plain = self.decimals is None or not abs(value) < MOST_DECIMALS
        if plain:
            number = f"{value:.3g}"
        else:
            number = f"{round(value, self.decimals or 0) + 0.0:.{self.decimals}f}"
        if error:
            return f"{number} ± {error:.1g}"
        return number


@dataclass(frozen=True)
class ScreeningStep:
    """A step of the screening: its question, the function that plans its instruments, and its
    quantities by name.
    """

    question: str
    plan: Callable[[Any], Any]
    quantities: Mapping[str, Quantity] = field(default_factory=dict)


STEPS: dict[str, ScreeningStep] = {}
"""The steps by name, in order. `ctrans.examine.screening.screen` adds those of ctrans. A new step
is one entry.
"""

STEP_QUANTITIES: dict[str, dict[str, Quantity]] = {
    "well-posedness": {
        "segments with infinite H": Quantity(
            "share of the certified segments whose Hamiltonian is infinite, for the ODE", share=True
        ),
    },
    "forward": {
        "added by depth": Quantity(
            "|X_D - Y_D|/|X_D|, Y the state without any sublayer: what the depth does to its input"
        ),
        "growth": Quantity("log10 of rms X_D over rms X_0", decimals=2),
        "growth exponent": Quantity(
            "p of |X_k - Y_k| ~ k^p from the middle block to the end; 1/2 to 1 where layers are"
            " alike"
        ),
        "token similarity": Quantity(
            "mean cosine between two tokens of a sequence in X_D", decimals=3
        ),
        "loss over guessing": Quantity(LOSS_EXCESS, decimals=3),
        "|x| in weights": Quantity("k of mean|X_D| ~ c^k, every map times c, c large", decimals=3),
    },
    "backward": {
        "condition": Quantity(
            "largest |J_i:D||X_i|/|X_D| over the measured blocks i, for the worst sequence (of 1 in"
            " a quick screening, else of up to 4): growth of relative changes"
        ),
        "log stretch": Quantity(
            "mean of log sigma |X_0|/|X_D| over the singular values sigma of J_0:D, of the first"
            " sequence"
        ),
        "log stretch, deviation": Quantity(
            "standard deviation of log sigma of J_0:D: 0 for an isometry"
        ),
        "|dv/dX| in weights": Quantity(
            "k of |dv/dX| ~ c^k of the middle attention and the middle FFN, each by itself: its own"
            " map times c",
            decimals=3,
        ),
    },
    "transport": {
        "W_2 growth": Quantity("largest (W_2 out/|X_D|)/(W_2 in/|X_0|) over perturbations"),
        "W_2 in weights": Quantity("k of W_2 out ~ c^k, every map times c, c large", decimals=3),
    },
    "attention": {
        "attention path": Quantity(
            "largest |dX_k+1/dX_k through the attention rows||X_k|/|X_k+1| over the measured"
            " layers, for the worst sequence (of 1 in a quick screening, else of up to 4)"
        ),
        "least entropy": Quantity(
            "entropy of a row in nats, in the mean over tokens, for the head of all layers where it"
            " is least"
        ),
    },
    "updates": {
        "Adam, least": Quantity(
            "least |dX_D/dW_k dW_k|/|X_D| over segments, one Adam step at lr 0.001 on the first"
            " sequence",
            STEP,
        ),
        "Adam, largest": Quantity("largest of the same", STEP),
        "Adam, spread": Quantity("largest over least of the same", STEP),
        "SGD, least": Quantity(
            "least |dX_D/dW_k dW_k|/|X_D| over segments, one step of gradient descent at lr 0.1 on"
            " the first sequence; it is in proportion to the rate, and as no one rate is usual"
            " there is no upper limit",
            STEP,
        ),
        "SGD, spread": Quantity("largest over least of the same", STEP),
        "weight size": Quantity(
            "root mean square of all entries of the depth's matrices: a step of Adam at rate eta"
            " moves each by about eta",
            STEP,
        ),
        "lr of SGD": Quantity(
            "2/lambda_max of the Gauss-Newton matrix of the first sequence's loss: where gradient"
            " descent stops being stable",
            _CURVATURE,
        ),
        "lr of Adam": Quantity(
            "38/lambda_max of Adam's preconditioned one: its edge of stability", _CURVATURE
        ),
        "kernel rank": Quantity(
            "effective rank of the tangent kernel of up to 16 tokens' target logits",
            "the kernel is of gradient descent in these weights: the share of each matrix in it"
            " changes with the gauge",
        ),
    },
}
"""Quantities by step, in the order of the report."""
QUANTITIES = {
    name: quantity for each in STEP_QUANTITIES.values() for name, quantity in each.items()
}
"""Quantities by name."""

_LESS = "add less per sublayer (--dt below 1)"
_SMALLER = "Use smaller initial weights"
_SCALED = f"{_SMALLER}, or {_LESS}."
_NOTHING = (
    (
        "Attention and FFN add almost nothing to the state at the end, compared with what the norms"
        " alone make of its start."
    ),
    "Use larger initial weights, add more per sublayer (--dt), or use a smaller embedding.",
)
_GROWS = "The state, or a small change of it, becomes far larger than at the start."
_EXPLODES = (_GROWS, f"{_SCALED} If the attention path explodes too, fix that first.")
_FORGETS = (
    "Almost nothing of a change of the input is left at the end.",
    f"{_SCALED} More of the state then passes. Or use fewer blocks.",
)
_OUTRUNS = (
    (
        "If the weights grow, this figure grows faster than they do. It is no fault of the current"
        " weights: any stack of sublayers without norms behaves this way."
    ),
    "Add a norm before or behind each sublayer. Without one only weight decay limits the growth.",
)
_IDLE_STEP = (
    "A step of the optimiser on some sublayer moves almost nothing.",
    (
        "Use a larger learning rate for that layer, or larger initial weights. Look for dead gains"
        " with ctrans diagnose."
    ),
)
_UNEVEN = (
    (
        "A step of the optimiser moves the state by far more through some sublayers than through"
        " others."
    ),
    (
        "Use learning rates by layer, or an initialisation that scales with depth (for ctrans's own"
        " GPT: --init, or --placement deepnorm)."
    ),
)


def _rule(
    quantity: str,
    verdict: str,
    texts: tuple[str, str],
    *,
    low: float = -math.inf,
    high: float = math.inf,
    severity: Severity = "serious",
) -> Check:
    described = QUANTITIES[quantity].description
    return Check(quantity, described, severity, OURS, *texts, low=low, high=high, verdict=verdict)


def offered(check: Check) -> bool:
    """Whether a step of the screening measures the check's quantity."""
    return any(check.quantity in step.quantities for step in STEPS.values())


CHECKS = Checks(
    "screening",
    {
        "depth does nothing": _rule("added by depth", "does nothing", _NOTHING, low=0.01),
        "states explode": _rule(
            "growth exponent",
            "explodes",
            (
                _GROWS,
                (
                    "Add a norm behind each sublayer where there is none (for ctrans's own GPT:"
                    f" --placement peri), {_LESS}, or use smaller initial weights."
                ),
            ),
            high=2.0,
        ),
        "tokens collapse": _rule(
            "token similarity",
            "tokens collapse",
            ("All tokens of a sequence end as nearly the same vector.", COLLAPSED),
            high=MOST_SIMILAR,
        ),
        "starts worse than guessing": _rule(
            "loss over guessing",
            "starts worse than guessing",
            ("The loss is above that of equal probabilities.", GUESSING),
            high=WORST_EXCESS,
        ),
        "states outrun weights": _rule(
            "|x| in weights", "outruns weights", _OUTRUNS, high=1.25, severity="note"
        ),
        "input is forgotten": _rule("condition", "forgets its input", _FORGETS, low=0.1),
        "small changes explode": _rule("condition", "explodes", _EXPLODES, high=100.0),
        "changes contract": _rule(
            "log stretch",
            "contracts",
            ("Most changes of the input shrink on their way, relative to the state.", _SCALED),
            low=-5.0,
        ),
        "changes expand": _rule(
            "log stretch",
            "expands",
            ("Most changes of the input grow on their way, relative to the state.", _SCALED),
            high=3.0,
        ),
        "all changes alike": _rule(
            "log stretch, deviation",
            "does nothing",
            ("All changes of the input come out alike in size.", _NOTHING[1]),
            low=1e-3,
        ),
        "changes ill-conditioned": _rule(
            "log stretch, deviation",
            "ill-conditioned",
            (
                "Some changes of the input grow while others shrink, by very different factors.",
                f"{_SCALED} Both keep a step near the identity.",
            ),
            high=3.0,
        ),
        "sensitivity outruns weights": _rule(
            "|dv/dX| in weights", "outruns weights", _OUTRUNS, high=1.25, severity="note"
        ),
        "inputs become one": _rule("W_2 growth", "forgets its input", _FORGETS, low=0.01),
        "distances explode": _rule("W_2 growth", "explodes", _EXPLODES, high=100.0),
        "distances outrun weights": _rule(
            "W_2 in weights", "outruns weights", _OUTRUNS, high=1.25, severity="note"
        ),
        "attention path explodes": _rule(
            "attention path",
            "explodes",
            (
                "A small change of the state becomes far larger through the attention rows.",
                (
                    "Make attention scores smaller: divide them by sqrt(d_head), add norms on"
                    " queries and keys (for ctrans's own GPT: --qk-norm rms), or use smaller W_Q"
                    " and W_K."
                ),
            ),
            high=30.0,
        ),
        "heads saturate": _rule(
            "least entropy",
            "heads saturate",
            (
                (
                    "In some layer the tokens of a head each read one other token, so its queries"
                    " and keys hardly learn."
                ),
                SATURATED,
            ),
            low=LEAST_ENTROPY,
        ),
        "Adam does not learn": _rule("Adam, least", "does not learn", _IDLE_STEP, low=1e-4),
        "Adam overshoots": _rule(
            "Adam, largest",
            "overshoots",
            (
                "A step of the optimiser on one sublayer replaces the last state.",
                (
                    "Use a lower learning rate or a longer warm-up, or a larger embedding, relative"
                    " to which a step is smaller."
                ),
            ),
            high=10.0,
        ),
        "Adam learns unevenly": _rule("Adam, spread", "layers learn unevenly", _UNEVEN, high=100.0),
        "SGD does not learn": _rule("SGD, least", "does not learn", _IDLE_STEP, low=1e-6),
        "SGD learns unevenly": _rule("SGD, spread", "layers learn unevenly", _UNEVEN, high=1000.0),
        "tokens learn as one": _rule(
            "kernel rank",
            "tokens learn as one",
            (
                "A step that is good for one token is the same step for all.",
                "Use a larger embedding, or sublayers that add less to it: tokens are too similar.",
            ),
            low=2.0,
        ),
    },
    offered,
)
"""The checks by name; `verdict` is the step's verdict in a word."""


def measured() -> dict[str, Quantity]:
    """The quantities of all steps by name."""
    return {name: quantity for step in STEPS.values() for name, quantity in step.quantities.items()}


def limits_of(quantity: str) -> dict[str, Any]:
    """The limits of a quantity (None for no limit), the verdicts beyond them, and the page's mark
    for a finding.
    """
    found: dict[str, Any] = {"low": None, "below": "", "high": None, "above": "", "mark": "bad"}
    for check in CHECKS.values():
        if check.quantity == quantity:
            if check.low > -math.inf:
                found |= {"low": check.low, "below": check.verdict}
            else:
                found |= {}
            if check.high < math.inf:
                found |= {"high": check.high, "above": check.verdict}
            else:
                found |= {}
            if check.severity == "note":
                found["mark"] = "note"
            else:
                found["mark"] = "bad"
    return found


def flags(quantities: Mapping[str, float]) -> dict[str, str]:
    """The verdicts of the quantities outside their limits."""
    return {
        name: check.verdict
        for name, value in quantities.items()
        for check in CHECKS.values()
        if check.quantity == name and check.fails(value)
    }


def judged(quantities: Mapping[str, float], otherwise: str) -> str:
    """A step's verdict: that of the first quantity outside its limits, else `otherwise`."""
    return next(iter(flags(quantities).values()), otherwise)


def findings_of(quantities: Mapping[str, Mapping[str, float]]) -> list[Finding]:
    """The findings of all quantities, given by step and name."""
    known = measured()
    readings = {
        name: [Reading(value, f"step {step}", f"{name} = {known[name].shown(value)}")]
        for step, values in quantities.items()
        for name, value in values.items()
        if name in known
    }
    return CHECKS.judge(readings)
