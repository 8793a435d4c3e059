"""The diagnosis' instruments of norms: their gains, and their eps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.base.median import median_of
from ctrans.dynamics.norm import Norm, SphereNorm
from ctrans.examine.diagnosis.reading import DiagnosticInstrument, named, place_of, rms
from ctrans.measure.walk import StepContext, of_text
from solvers.run import finite

NORMS = {
    "state_norm": ("gain around the state", "the norm around the state"),
    "output_norm": ("gain of an output norm", "the output norm"),
    "input_norm": ("gain of an input norm", "the input norm"),
}
"""By a sublayer's attribute: the quantity of its smallest gain, and the norm's name."""
DEAD = 1e-3
"""A gain below this share of the norm's median counts as dead."""
OUTLIER = 10.0
"""A channel is an outlier if its mean |x| exceeds this many times the median channel's. Those that
MiniLM's last norm silences have 42 to 64 times it.
"""


def smallest_gain(gains: Tensor, left_out: Tensor | None = None) -> tuple[float, str]:
    """The smallest |gamma_i| over the median, and the dead channels in words. Channels `left_out`
    do not count.
    """
    size = gains.detach().abs().double().flatten()
    median = median_of(size)
    if left_out is None:
        counted = size
    else:
        counted = size.masked_fill(left_out, math.inf)
    smallest = float(counted.min())
    if not size.any():
        share = math.nan  # the whole norm is dead, which its largest gain says
    elif smallest == 0:
        share = 0.0  # also if most gains are 0, and so their median
    else:
        share = smallest / median if median else math.inf
    dead = [int(i) for i in counted.argsort() if counted[i] == 0 or counted[i] < DEAD * median]
    if not dead:
        dead = [int(counted.argmin())]
    dead_gains = [f"|gamma| = {float(size[i]):.2g} in channel {i}" for i in dead]
    return share, f"{named(dead_gains)}; the norm's median is {median:.2g}"


def silenced(norm: Norm, x: Tensor) -> tuple[Tensor, float, str]:
    """The channels with a dead gain whose input is an outlier, their largest ratio, and words.

    The ratio is a channel's mean |x_i| over the median of all channels.
    """
    size = norm.gamma.detach().abs().double().flatten()
    mean_size = x.detach().abs().double().flatten(0, -2).mean(0)
    ratio = mean_size / max(median_of(mean_size), torch.finfo(torch.float64).tiny)
    if ratio.shape != size.shape:
        return torch.zeros_like(size, dtype=torch.bool), 0.0, "the norm has groups of channels"
    quiet = (size < DEAD * median_of(size)) & (ratio > OUTLIER)
    channels = [
        f"|x| = {float(mean_size[i]):.3g} in channel {int(i)}, {float(ratio[i]):.3g} times the"
        " median"
        for i in quiet.nonzero()[:, 0]
    ]
    largest_ratio = 0.0
    if quiet.any():
        largest_ratio = float(ratio[quiet].max())
    return quiet, largest_ratio, f"{named(channels)}, with a gain of nearly 0"


class GainsByNorm(DiagnosticInstrument):
    """Gains of each sublayer's norms: the smallest and the largest over the median, and an output
    norm's root mean square.
    """

    name = "gains"

    def forward(self, at: StepContext) -> None:
        for attribute, (quantity, name) in NORMS.items():
            norm: Norm | None = getattr(at.sublayer, attribute)
            if norm is None:
                continue
            gains = norm.gamma.detach()
            norm_place = f"{place_of(self.depth, at.k)}, {name}"
            largest = float(gains.abs().max())
            size = rms(gains)
            quiet = None
            if attribute != "output_norm" and finite(at.x):
                if attribute == "input_norm":
                    x = at.sublayer.residual.read(at.entered)
                else:
                    x = at.entered + at.h * at.sublayer(at.entered)
                quiet, ratio, silenced_channels = silenced(norm, of_text(x, self.kept))
                self.add("outlier with a dead gain", ratio, silenced_channels, at.k, norm_place)
            self.add(quantity, *smallest_gain(gains, quiet), at.k, norm_place)
            self.add(
                "largest gain of a norm",
                largest,
                f"its largest |gamma| is {largest:.2g}",
                at.k,
                norm_place,
            )
            median = median_of(gains.abs())
            if median:
                figure = (
                    f"|gamma| = {largest:.3g} in channel {int(gains.abs().argmax())}; the norm's"
                    f" median is {median:.2g}"
                )
                self.add("largest gain over the median", largest / median, figure, at.k, norm_place)
            if attribute == "output_norm":
                self.add(
                    "output gain",
                    size,
                    f"the gains' root mean square is {size:.3g}",
                    at.k,
                    norm_place,
                )


class EpsShare(DiagnosticInstrument):
    """eps over mean((C x)^2), the median over tokens, of each norm's input x."""

    name = "eps"

    def forward(self, at: StepContext) -> None:
        part = at.sublayer
        if part.input_norm is not None:
            norm_input = part.residual.read(at.entered)
            self._read(at.k, "input_norm", part.input_norm, norm_input)
        if part.state_norm is not None:
            summed = at.entered + at.h * part(at.entered)
            self._read(at.k, "state_norm", part.state_norm, summed)
        elif part.output_norm is not None:
            self._read(at.k, "output_norm", part.output_norm, part.field(part.given(at.entered)))

    def _read(self, k: int, attribute: str, norm: Norm, x: Tensor) -> None:
        if not isinstance(norm, SphereNorm):  # other norms squash or clip, and do not divide
            return
        centred = norm.centre(of_text(x.detach(), self.kept))
        size = median_of(centred.double().square().mean(-1))
        if norm.eps and size and math.isfinite(size):
            figure = f"eps = {norm.eps:.3g}, and the mean square of the norm's input is {size:.3g}"
            self.add(
                "eps over mean square",
                norm.eps / size,
                figure,
                k,
                f"{place_of(self.depth, k)}, {NORMS[attribute][1]}",
            )
