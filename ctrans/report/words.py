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
    "condition": Drawn("rest of the model", "block looked at", "relative gain up to the end"),
    "updates": Drawn("one step of Adam", "segment", "relative change of the state at the end"),
    "attention": Drawn("attention's rows alone", "segment", "relative gain through the softmax"),
}
"""What a screening measures by depth."""
WATCHED = {
    "rms": ("hidden states", "root mean square of X"),
    "gradient": ("gradients", "norm of a sublayer's, |dL/dW|"),
    "costate": ("costate", "|dL/dX|"),
    "velocity": ("velocities", "root mean square of r"),
    "step_share": ("length of a step", "|h r| / |X|"),
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
