"""What the screening measures: each quantity's meaning, the limits that it is held to on both sides, and its gauge.

A quantity is *gauge-free* if weights that make the same function give the same number. Five scalings of weights leave a Transformer
as it is: the last map times c before an output norm; an input norm's gain times c with the matrix behind it divided by c; W_V times c and
W_O divided by c; W_Q times c and W_K divided by c; W_1 times c and W_2 divided by c for ReLU. (Exactly where a norm's eps is 0 or
scaled along; as far as eps is small against what it is added to otherwise.) An optimiser sees them: what it does to the function
depends on them, so a quantity about an optimiser's step cannot be gauge-free, and says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

STEP = (
    "a step is taken in the weights: with W times c the gradient is 1/c times what it was, so that SGD moves the function by 1/c^2 and "
    "Adam by 1/c of what it did"
)


@dataclasses.dataclass(frozen=True)
class Quantity:
    """What a number says as a formula, and the limits outside of which it is called `below` or `above`; None where there is none.

    `gauge` is empty for a gauge-free quantity; else why it is not, and what that matters to. `decimals` is for exponents and the
    like, which are shown with as many; a `share` is shown in per cent; all else has three digits. `mark` is how it is shown outside of
    its limits: "note" where that says nothing of the weights as they are.
    """

    says: str
    low: float | None = None
    below: str = ""
    high: float | None = None
    above: str = ""
    gauge: str = ""
    decimals: int | None = None
    share: bool = False
    mark: Literal["bad", "note"] = "bad"

    def flag(self, value: float) -> str:
        """What the value is called outside of the limits; empty inside, and for nan, which is not known."""
        if self.low is not None and value < self.low:
            return self.below
        return self.above if self.high is not None and value > self.high else ""

    @property
    def limits(self) -> str:
        """For a table: "0.01 to 10", "at most 1", or a dash."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        if self.low is None:
            return "–" if self.high is None else f"at most {self.high:g}"
        return f"at least {self.low:g}"


_LARGER = "outruns weights"
QUANTITIES: dict[str, Quantity] = {
    "segments with infinite H": Quantity(
        "of the certified segments, the share whose Hamiltonian, by the ODE, is infinite", share=True
    ),
    "loss over guessing": Quantity(
        "initial loss less log V, the loss of equal probabilities, in nats; of fresh weights a few tenths either way are chance",
        high=1.0,
        above="starts worse than guessing",
        decimals=3,
    ),
    "added by depth": Quantity(
        "|X_D - Y_D|/|X_D|, Y the state without any sublayer: what the depth does to its input", low=0.01, below="does nothing"
    ),
    "growth": Quantity("log10 of rms X_D over rms X_0", decimals=2),
    "growth exponent": Quantity(
        "p of |X_k - Y_k| ~ k^p from the middle block to the end; 1/2 to 1 where layers are alike", high=2.0, above="explodes"
    ),
    "token similarity": Quantity(
        "mean cosine between two tokens of a sequence in X_D", high=0.99, above="tokens collapse", decimals=3
    ),
    "|x| in weights": Quantity(
        "k of mean|X_D| ~ c^k, every map times c, c large", high=1.25, above=_LARGER, decimals=3, mark="note"
    ),
    "condition": Quantity(
        "largest |J_i:D||X_i|/|X_D| over blocks i looked at, of the worst sequence (of 1 in a quick screening, else of up to 4): "
        "growth of relative changes",
        low=0.1,
        below="forgets its input",
        high=100.0,
        above="explodes",
    ),
    "log stretch": Quantity(
        "mean of log sigma |X_0|/|X_D| over the singular values sigma of J_0:D, of the first sequence",
        low=-5.0,
        below="contracts",
        high=3.0,
        above="expands",
    ),
    "log stretch, deviation": Quantity(
        "standard deviation of log sigma of J_0:D: 0 for an isometry",
        low=1e-3,
        below="does nothing",
        high=3.0,
        above="ill-conditioned",
    ),
    "|dv/dX| in weights": Quantity(
        "k of |dv/dX| ~ c^k of the middle attention and the middle FFN, each by itself: its own map times c",
        high=1.25,
        above=_LARGER,
        decimals=3,
        mark="note",
    ),
    "W_2 growth": Quantity(
        "largest (W_2 out/|X_D|)/(W_2 in/|X_0|) over perturbations",
        low=0.01,
        below="forgets its input",
        high=100.0,
        above="explodes",
    ),
    "W_2 in weights": Quantity(
        "k of W_2 out ~ c^k, every map times c, c large", high=1.25, above=_LARGER, decimals=3, mark="note"
    ),
    "attention path": Quantity(
        "largest |dX_k+1/dX_k through the attention rows||X_k|/|X_k+1| over the layers looked at, of the worst "
        "sequence (of 1 in a quick screening, else of up to 4)",
        high=30.0,
        above="explodes",
    ),
    "least entropy": Quantity(
        "entropy of a row in nats, in the mean over tokens, of the head of all layers where it is least",
        low=0.05,
        below="heads saturate",
    ),
    "Adam, least": Quantity(
        "least |dX_D/dW_k dW_k|/|X_D| over segments, one Adam step at lr 0.001 on the first sequence",
        low=1e-4,
        below="does not learn",
        gauge=STEP,
    ),
    "Adam, largest": Quantity("largest of the same", high=10.0, above="overshoots", gauge=STEP),
    "Adam, spread": Quantity("largest over least of the same", high=100.0, above="layers learn unevenly", gauge=STEP),
    "SGD, least": Quantity(
        "least |dX_D/dW_k dW_k|/|X_D| over segments, one step of gradient descent at lr 0.1 on the first sequence; it is in "
        "proportion to the rate, and as no one rate is usual there is no upper limit",
        low=1e-6,
        below="does not learn",
        gauge=STEP,
    ),
    "SGD, spread": Quantity("largest over least of the same", high=1000.0, above="layers learn unevenly", gauge=STEP),
    "weight size": Quantity(
        "root mean square of all entries of the depth's matrices: a step of Adam at rate eta moves each by about eta", gauge=STEP
    ),
    "lr of SGD": Quantity(
        "2/lambda_max of the Gauss-Newton matrix of the first sequence's loss: where gradient descent stops being stable",
        gauge=f"curvature is a second derivative by the weights, and {STEP}",
    ),
    "lr of Adam": Quantity(
        "38/lambda_max of Adam's preconditioned one: its edge of stability",
        gauge=f"curvature is a second derivative by the weights, and {STEP}",
    ),
    "kernel rank": Quantity(
        "effective rank of the tangent kernel of up to 16 tokens' target logits",
        low=2.0,
        below="tokens learn as one",
        gauge="the kernel is of gradient descent in these weights: the share of each matrix in it changes with the gauge",
    ),
}
"""By name, as the steps report them; a new one is one entry. The limits are a choice, set while looking at the seven placements at
initialisation: wide, and not yet held against training runs. Inside of them nothing is said of which of two models is better."""

MOST = 1000.0
"""From here on three digits say more than decimals."""
IN_JSON: dict[str, str] = {
    "segments.slope": "slope and radii bound the last map's weights, whose features scale against them",
    "segments.certificate.growth": "the same, by ascent",
    "segments.certificate.gained": "the same, by ascent over gains and weights together",
    "segments.training_threshold": "a weight decay acts on the weights: its threshold scales with the gain before them",
    "gradients": "|dL/dW| by sublayer and matrix are derivatives by the weights",
    "last": "|dL/dW_2| of the last FFN and Kim's bound on it are derivatives by the weights; their ratio is gauge-free",
    "curvature": "lambda_max, trace and tangent kernel are made of derivatives by the weights",
    "updates": "r_k is of a step in the weights",
    "layers.measured": "the local value of the map alone, without the norms around it; `path` has them",
    "layers.bound": "theorem 5.1 bounds that value",
    "layers.printed": "the same as it is printed",
    "layers.value_path": "its first term, |W_O| sum_h |V_h|",
    "layers.attention_path": "its second term",
    "layers.B": "the longest token of the map's input, which grows with the input norm's gain",
    "layers.G": "|W_O||W_Q||W_K||W_V|",
    "layers.S": "S = (theta/tau) B^2 G has both",
    "layers.log_sensitivity": "the logarithms of its factors",
}
"""Figures of `screen.json` that are not gauge-free either, by the end of their path, and why."""


def flags(quantities: Mapping[str, float]) -> dict[str, str]:
    """What lies outside of its limits, by name: what it is called."""
    found = {name: QUANTITIES[name].flag(value) for name, value in quantities.items() if name in QUANTITIES}
    return {name: word for name, word in found.items() if word}


def sides(word: str) -> list[str]:
    """Each limit beyond which a quantity is called that."""
    below = [f"{name} below {q.low:g}" for name, q in QUANTITIES.items() if word and q.below == word]
    return below + [f"{name} above {q.high:g}" for name, q in QUANTITIES.items() if word and q.above == word]


def shown(name: str, value: float, error: float | None = None) -> str:
    """The value for a table, with its error where one is given: three digits, per cent, or decimals, as the quantity has it."""
    if math.isnan(value):
        return "unknown"
    decimals = QUANTITIES[name].decimals if name in QUANTITIES else None
    if name in QUANTITIES and QUANTITIES[name].share:
        return f"{value:.0%}"
    plain = decimals is None or not abs(value) < MOST
    number = f"{value:.3g}" if plain else f"{round(value, decimals or 0) + 0.0:.{decimals}f}"
    return number if not error else f"{number} ± {error:.1g}"
