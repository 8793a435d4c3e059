"""What the verdicts and the terms of a screening mean."""

from __future__ import annotations

import re

from ctrans.measure.measures import MEASURES
from ctrans.measure.missing import NOT_APPLICABLE

JUDGED = {
    "held": (
        "a norm limits it, so larger weights hardly change it; for attention: it is within its"
        " limit"
    ),
    "follows weights": (
        "no norm limits it. If every map's output were c times as large (c large), the last state"
        " (forward) and the distance between two inputs' last states (transport) would be about c"
        " times as large. For backward: if the output of one sublayer in the middle were c times as"
        " large, its sensitivity would be about c times as large too"
    ),
    "moves": "one step of the optimiser moves the last state by amounts within the limits",
    "holds": "the gradient of the last FFN stays within the bound that theory gives",
    "violated": "the gradient of the last FFN exceeds the bound that theory gives",
    "well-posed": "the best output of a layer is finite, whatever the weights are",
    "well-posed for bounded gains": (
        "the best output of a layer is finite as long as the gains of its norm are bounded"
    ),
    "well-posed, the rest fixed": (
        "the best output of a layer is finite if only the maps that pay a penalty are trained"
    ),
    "degenerate": (
        "the best output of a layer is infinite: only the size of its weights bounds it. This holds"
        " for GPT-2 and Llama, and is no fault"
    ),
    "open": "neither a bound nor a counterexample was found",
    "non-finite": "some states are infinite or not a number",
    "unknown": "it could not be measured; Reasons says why",
    NOT_APPLICABLE: "it does not apply to this model; Reasons says why",
}
"""Verdicts of a screening for which every quantity is within its limits."""
TERMS = {
    "segment": "one sublayer's step, attention or FFN, counted from 0",
    "depth-time": "the sum of the segments' lengths dt: 12 sublayers of dt = 1 are 12",
    "H": (
        "the Hamiltonian: how fast, at most, any output that a layer could have would lower the"
        " loss"
    ),
    "R^": (
        "with the last map's weights no larger than R, a layer's best output grows like this power"
        " of R: R^0 is none"
    ),
    "u_j": "token j's output before the norm's gains gamma and offsets beta",
    "ascents": "searches for an output that is better still, which know no formula",
    "law": (
        "a curve over the depth (linear, exponential ..) that fits the sizes, if one is clearly"
        " best (AIC, Akaike's criterion)"
    ),
    "bound": "what theory allows at most, with these weights: used little of, it says little",
    "c^": (
        "with weights c times as large, it is this power of c times as large: c^1 follows them, c^0"
        " is held"
    ),
    "Lyapunov exponent": (
        "small changes of the input grow by exp(exponent) per unit of depth-time, at most, in the"
        " long run"
    ),
    "W_2": (
        "the Wasserstein distance of order 2: how far apart two clouds of hidden states are, in the"
        " root mean square"
    ),
    "adversarial perturbation": "the small change of the input that grows most",
    "generalisation radius": (
        "how far, by a theorem, the true distribution may be from the samples; vacuous: hardly less"
        " than from one"
    ),
    "theta": (
        "how much a row of attention can shift when its scores change: 1 at most, 0 where a token"
        " reads one other alone"
    ),
    "theorem 5.1": "Emadi's bound on how far attention's output can follow its input",
    "nats": "entropy: a row of k nats is as wide as exp(k) tokens read alike; 0 is one token alone",
    "to first order": "as the derivative says, so of small steps",
    "curvature": (
        "how fast the gradient changes along a step: beyond 2/curvature a step of gradient descent"
        " goes too far"
    ),
    "Xiong": "what Xiong et al. (2020) prove of fresh weights, where their premises hold",
    "Jacobian": "all derivatives of the outputs by the inputs",
    "costate": "the gradient of the loss by a hidden state",
}
"""What sentences under Reasons take for granted, in the order of the steps."""


def terms_in(text: str) -> list[str]:
    """Those of `TERMS` that stand in a text, each with its meaning."""

    def stands(term: str) -> bool:
        if term[-1].isalnum():
            end = r"s?(?![^\W_])"
        else:
            end = ""
        return re.search(rf"(?<!\w){re.escape(term)}{end}", text) is not None

    return [f"{term}: {meaning}" for term, meaning in TERMS.items() if stands(term)]


def verdicts() -> dict[str, str]:
    """What every verdict of a screening means; of those outside of a limit, beyond which."""
    checks = MEASURES.checks("screening")
    impacts = {check.verdict: check.impact for check in reversed(list(checks.values()))}
    limits = {
        word: [f"{c.quantity} {c.limit}" for c in checks.values() if c.verdict == word]
        for word in impacts
    }
    return JUDGED | {
        word: f"{impact[:-1]} ({', or '.join(limits[word])})"
        for word, impact in reversed(impacts.items())
    }
