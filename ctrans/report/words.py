"""Titles and axes of what is drawn, said once: pictures in files and charts on pages show the same figures."""

from __future__ import annotations

from typing import NamedTuple


class Drawn(NamedTuple):
    """A panel's title, and its two axes in words with their units."""

    title: str
    x: str
    y: str


SCREENED = {
    "growth": Drawn("hidden states", "segments done", "mean |x| over entries"),
    "added": Drawn("added by the depth", "segments done", "share of the state, |X − Y| / |X|"),
    "apart": Drawn("tokens apart", "segments done", "1 − mean cosine of two tokens"),
    "sensitivity": Drawn("sensitivity of a sublayer", "segment", "largest gain, |dv/dX|"),
    "gradients": Drawn("gradients", "segment", "norm of a sublayer's, |dL/dW|"),
    "condition": Drawn("what a small change becomes", "block that it is made before", "relative gain up to the end"),
    "updates": Drawn("one step of Adam", "segment", "relative change of the state at the end"),
    "attention": Drawn("attention's rows alone", "segment", "relative gain through the softmax"),
}
"""What a screening measures by depth."""
WATCHED = {
    "rms": ("hidden states", "root mean square of X"),
    "gradient": ("gradients", "norm of a sublayer's, |dL/dW|"),
    "costate": ("costate", "|dL/dX|"),
    "velocity": ("what sublayers add", "root mean square of r"),
    "step_share": ("length of a step", "|dt r| / |X|, of what is added"),
    "bound_share": ("used of the bound", "share of what norm or weights allow"),
    "update": ("updates", "|change of W| / |W|, one step"),
    "surprise": ("surprise", "gradient / root of Adam's second moment"),
    "peak": ("outliers", "largest over median |x|"),
    "logit": ("attention scores", "largest |score|"),
    "entropy": ("attention's entropy", "share of that of equal weights"),
    "routing": ("experts used", "share of the experts"),
}
"""What a monitor sees by depth: a title, and the figure in words."""
ALONG = {"state": "sublayers done", "sublayer": "sublayer", "head": "head, counted through the depth"}
"""The axis along the depth, by a gauge's scope."""
JUDGED = {
    "held": "a norm stands in between, so that growing weights hardly change it; of attention: within its limit",
    "outruns weights": "it grows faster than the weights do",
    "follows weights": "no norm stands in between: twice the weights are twice the figure, now within its limits",
    "moves": "one step of the optimiser moves the last state by amounts within the limits",
    "holds": "the last FFN's gradient keeps the bound that theory has for it",
    "violated": "the last FFN's gradient is above the bound that theory has for it",
    "well-posed": "a layer's best output is finite, whatever the weights",
    "well-posed for bounded gains": "a layer's best output is finite as long as its norm's gains are limited",
    "well-posed, the rest fixed": "a layer's best output is finite where only the maps that pay a penalty may change",
    "degenerate": "a layer's best output is infinite, as nothing but its weights' size bounds it: true of GPT-2 and Llama, and no fault",
    "open": "neither a bound nor a counterexample was found",
    "non-finite": "states overflow, or are no numbers",
    "unknown": "it could not be measured; why is under Reasons",
    "n/a": "it does not apply to this model; why is under Reasons",
}
"""Verdicts of a screening that call nothing outside of its limits."""
