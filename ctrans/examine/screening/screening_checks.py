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
from dataclasses import dataclass
from typing import Any

from ctrans.examine.diagnosis import diagnostic_checks as diagnostic_checks  # measures in both
from ctrans.measure.findings import OURS, Check, Finding, Reading, Severity
from ctrans.measure.measures import MEASURES, Measure, checks_of

STEP = (
    "a step is taken in the weights: with W times c the gradient is divided by c, so SGD's step"
    " moves the function by 1/c^2 and Adam's by 1/c as much"
)
_CURVATURE = f"curvature is a second derivative by the weights, and {STEP}"


QUESTIONS = {
    "well-posedness": "is training, read as an ODE, a well-posed control problem?",
    "forward": "how do hidden states grow?",
    "backward": "how do gradients pass?",
    "transport": "how far does uncertainty travel?",
    "attention": "how sensitive is attention?",
    "updates": "what does one optimiser step do?",
    "initialisation": "what does theory say of the initial weights?",
}
"""The question of each step of ctrans, in order."""
MEASURED_IN: dict[str, tuple[str, ...]] = {
    "well-posedness": ("segments with infinite H",),
    "forward": (
        "added by depth",
        "decades of growth",
        "growth exponent",
        "token similarity",
        "loss over guessing",
        "|x| in weights",
    ),
    "backward": ("condition", "log stretch", "log stretch, deviation", "|dv/dX| in weights"),
    "transport": ("W_2 growth", "W_2 in weights"),
    "attention": ("attention path", "least entropy of a head"),
    "updates": (
        "Adam, least",
        "Adam, largest",
        "Adam, spread",
        "SGD, least",
        "SGD, spread",
        "weight size",
        "lr of SGD",
        "lr of Adam",
        "kernel rank",
    ),
}
"""The measures of each step, in the order of the report."""


@dataclass(frozen=True)
class ScreeningStep:
    """A step of the screening: its question, the function that plans its instruments, and the names
    of the measures that it takes.
    """

    question: str
    plan: Callable[[Any], Any]
    measures: tuple[str, ...] = ()


STEPS: dict[str, ScreeningStep] = {}
"""The steps by name, in order. `ctrans.examine.screening.screen` adds those of ctrans. A new step
is one entry.
"""

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


def _limit(
    verdict: str,
    texts: tuple[str, str],
    *,
    low: float = -math.inf,
    high: float = math.inf,
    severity: Severity = "serious",
) -> Check:
    impact, remediation = texts
    return Check(
        severity=severity,
        source=OURS,
        impact=impact,
        remediation=remediation,
        low=low,
        high=high,
        near=None,
        verdict=verdict,
    )


MEASURES.add(
    "ctrans screen",
    {
        "segments with infinite H": Measure(
            formula="share of the certified segments whose Hamiltonian is infinite, for the ODE",
            share=True,
            detail=True,
            topic=QUESTIONS["well-posedness"],
        ),
        "added by depth": Measure(
            formula=(
                "|X_D - Y_D|/|X_D|, Y the state without any sublayer: what the depth does to its"
                " input"
            ),
            detail=True,
            topic=QUESTIONS["forward"],
            checks={"depth does nothing": _limit("does nothing", _NOTHING, low=0.01)},
        ),
        "decades of growth": Measure(
            key="growth",
            formula="log10 of rms X_D over rms X_0",
            decimals=2,
            detail=True,
            topic=QUESTIONS["forward"],
        ),
        "growth exponent": Measure(
            formula=(
                "p of |X_k - Y_k| ~ k^p from the middle block to the end; 1/2 to 1 where layers are"
                " alike"
            ),
            detail=True,
            topic=QUESTIONS["forward"],
            checks={
                "states explode": _limit(
                    "explodes",
                    (
                        _GROWS,
                        (
                            "Add a norm behind each sublayer where there is none (for ctrans's own"
                            f" GPT: --placement peri), {_LESS}, or use smaller initial weights."
                        ),
                    ),
                    high=2.0,
                )
            },
        ),
        "|x| in weights": Measure(
            formula="k of mean|X_D| ~ c^k, every map times c, c large",
            decimals=3,
            detail=True,
            topic=QUESTIONS["forward"],
            checks={
                "states outrun weights": _limit(
                    "outruns weights", _OUTRUNS, high=1.25, severity="note"
                )
            },
        ),
        "condition": Measure(
            formula=(
                "largest |J_i:D||X_i|/|X_D| over the measured blocks i, for the worst sequence (of"
                " 1 in a quick screening, else of up to 4): growth of relative changes"
            ),
            detail=True,
            topic=QUESTIONS["backward"],
            checks={
                "input is forgotten": _limit("forgets its input", _FORGETS, low=0.1),
                "small changes explode": _limit("explodes", _EXPLODES, high=100.0),
            },
        ),
        "log stretch": Measure(
            formula=(
                "mean of log sigma |X_0|/|X_D| over the singular values sigma of J_0:D, of the"
                " first sequence"
            ),
            detail=True,
            topic=QUESTIONS["backward"],
            checks={
                "changes contract": _limit(
                    "contracts",
                    (
                        "Most changes of the input shrink on their way, relative to the state.",
                        _SCALED,
                    ),
                    low=-5.0,
                ),
                "changes expand": _limit(
                    "expands",
                    (
                        "Most changes of the input grow on their way, relative to the state.",
                        _SCALED,
                    ),
                    high=3.0,
                ),
            },
        ),
        "log stretch, deviation": Measure(
            formula="standard deviation of log sigma of J_0:D: 0 for an isometry",
            detail=True,
            topic=QUESTIONS["backward"],
            checks={
                "all changes alike": _limit(
                    "does nothing",
                    ("All changes of the input come out alike in size.", _NOTHING[1]),
                    low=1e-3,
                ),
                "changes ill-conditioned": _limit(
                    "ill-conditioned",
                    (
                        (
                            "Some changes of the input grow while others shrink, by very different"
                            " factors."
                        ),
                        f"{_SCALED} Both keep a step near the identity.",
                    ),
                    high=3.0,
                ),
            },
        ),
        "|dv/dX| in weights": Measure(
            formula=(
                "k of |dv/dX| ~ c^k of the middle attention and the middle FFN, each by itself: its"
                " own map times c"
            ),
            decimals=3,
            detail=True,
            topic=QUESTIONS["backward"],
            checks={
                "sensitivity outruns weights": _limit(
                    "outruns weights", _OUTRUNS, high=1.25, severity="note"
                )
            },
        ),
        "W_2 growth": Measure(
            formula="largest (W_2 out/|X_D|)/(W_2 in/|X_0|) over perturbations",
            detail=True,
            topic=QUESTIONS["transport"],
            checks={
                "inputs become one": _limit("forgets its input", _FORGETS, low=0.01),
                "distances explode": _limit("explodes", _EXPLODES, high=100.0),
            },
        ),
        "W_2 in weights": Measure(
            formula="k of W_2 out ~ c^k, every map times c, c large",
            decimals=3,
            detail=True,
            topic=QUESTIONS["transport"],
            checks={
                "distances outrun weights": _limit(
                    "outruns weights", _OUTRUNS, high=1.25, severity="note"
                )
            },
        ),
        "attention path": Measure(
            formula=(
                "largest |dX_k+1/dX_k through the attention rows||X_k|/|X_k+1| over the measured"
                " layers, for the worst sequence (of 1 in a quick screening, else of up to 4)"
            ),
            detail=True,
            topic=QUESTIONS["attention"],
            checks={
                "attention path explodes": _limit(
                    "explodes",
                    (
                        (
                            "A small change of the state becomes far larger through the attention"
                            " rows."
                        ),
                        (
                            "Make attention scores smaller: divide them by sqrt(d_head), add norms"
                            " on queries and keys (for ctrans's own GPT: --qk-norm rms), or use"
                            " smaller W_Q and W_K."
                        ),
                    ),
                    high=30.0,
                )
            },
        ),
        "Adam, least": Measure(
            formula=(
                "least |dX_D/dW_k dW_k|/|X_D| over segments, one Adam step at lr 0.001 on the first"
                " sequence"
            ),
            gauge=STEP,
            detail=True,
            topic=QUESTIONS["updates"],
            checks={"Adam does not learn": _limit("does not learn", _IDLE_STEP, low=1e-4)},
        ),
        "Adam, largest": Measure(
            formula="largest of the same",
            gauge=STEP,
            detail=True,
            topic=QUESTIONS["updates"],
            checks={
                "Adam overshoots": _limit(
                    "overshoots",
                    (
                        "A step of the optimiser on one sublayer replaces the last state.",
                        (
                            "Use a lower learning rate or a longer warm-up, or a larger embedding,"
                            " relative to which a step is smaller."
                        ),
                    ),
                    high=10.0,
                )
            },
        ),
        "Adam, spread": Measure(
            formula="largest over least of the same",
            gauge=STEP,
            detail=True,
            topic=QUESTIONS["updates"],
            checks={"Adam learns unevenly": _limit("layers learn unevenly", _UNEVEN, high=100.0)},
        ),
        "SGD, least": Measure(
            formula=(
                "least |dX_D/dW_k dW_k|/|X_D| over segments, one step of gradient descent at lr 0.1"
                " on the first sequence; it is in proportion to the rate, and as no one rate is"
                " usual there is no upper limit"
            ),
            gauge=STEP,
            detail=True,
            topic=QUESTIONS["updates"],
            checks={"SGD does not learn": _limit("does not learn", _IDLE_STEP, low=1e-6)},
        ),
        "SGD, spread": Measure(
            formula="largest over least of the same",
            gauge=STEP,
            detail=True,
            topic=QUESTIONS["updates"],
            checks={"SGD learns unevenly": _limit("layers learn unevenly", _UNEVEN, high=1000.0)},
        ),
        "weight size": Measure(
            formula=(
                "root mean square of all entries of the depth's matrices: a step of Adam at rate"
                " eta moves each by about eta"
            ),
            gauge=STEP,
            detail=True,
            topic=QUESTIONS["updates"],
        ),
        "lr of SGD": Measure(
            formula=(
                "2/lambda_max of the Gauss-Newton matrix of the first sequence's loss: where"
                " gradient descent stops being stable"
            ),
            gauge=_CURVATURE,
            detail=True,
            topic=QUESTIONS["updates"],
        ),
        "lr of Adam": Measure(
            formula="38/lambda_max of Adam's preconditioned one: its edge of stability",
            gauge=_CURVATURE,
            detail=True,
            topic=QUESTIONS["updates"],
        ),
        "kernel rank": Measure(
            formula="effective rank of the tangent kernel of up to 16 tokens' target logits",
            gauge=(
                "the kernel is of gradient descent in these weights: the share of each matrix in it"
                " changes with the gauge"
            ),
            detail=True,
            topic=QUESTIONS["updates"],
            checks={
                "tokens learn as one": _limit(
                    "tokens learn as one",
                    (
                        "A step that is good for one token is the same step for all.",
                        (
                            "Use a larger embedding, or sublayers that add less to it: tokens are"
                            " too similar."
                        ),
                    ),
                    low=2.0,
                )
            },
        ),
    },
    topic="screening",
)
CHECKS = checks_of("screening")
"""The checks by name; `verdict` is the step's verdict in a word."""


def measures_of_steps() -> dict[str, Measure]:
    """The measures of all steps by name."""
    return {name: MEASURES[name] for step in STEPS.values() for name in step.measures}


def limits_of(name: str) -> dict[str, Any]:
    """The limits of a measure (None for no limit), the verdicts beyond them, and the mark for a
    finding.
    """
    limits: dict[str, Any] = {"low": None, "below": "", "high": None, "above": "", "mark": "bad"}
    for check in CHECKS.values():
        if check.quantity != name:
            continue
        if check.low > -math.inf:
            limits |= {"low": check.low, "below": check.verdict}
        if check.high < math.inf:
            limits |= {"high": check.high, "above": check.verdict}
        limits["mark"] = "bad"
        if check.severity == "note":
            limits["mark"] = "note"
    return limits


def flags(quantities: Mapping[str, float]) -> dict[str, str]:
    """The verdicts of the measures outside their limits."""
    return {
        name: check.verdict
        for name, value in quantities.items()
        for check in CHECKS.values()
        if check.quantity == name and check.fails(value)
    }


def judged(quantities: Mapping[str, float], otherwise: str) -> str:
    """A step's verdict: that of the first measure outside its limits, else `otherwise`."""
    return next(iter(flags(quantities).values()), otherwise)


def findings_of(quantities: Mapping[str, Mapping[str, float]]) -> list[Finding]:
    """The findings of all measures, given by step and name. Those that the diagnosis of the same
    walk judges too are its findings.
    """
    measures = measures_of_steps()
    readings = {
        name: [Reading(value, f"step {step}", f"{name} = {measures[name].shown(value)}")]
        for step, values in quantities.items()
        for name, value in values.items()
        if name in measures
    }
    return [
        finding
        for finding in CHECKS.judge(readings)
        if "diagnosis" not in CHECKS[finding.check].topics
    ]
