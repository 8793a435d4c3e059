"""The table of gauges: what each figure of a report is, and how it is measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from ctrans.training.monitor.reductions import length, sample_rows
from ctrans.training.monitor.scores import largest_score, row_entropy, weight_ahead
from solvers import ConfigError

Scope = Literal["run", "state", "sublayer", "head"]
Figures = dict[str, float | list[float]]
"""The figures of a report by gauge: a number for a gauge of the run, else a list by place; nan is
unknown.
"""
GaugeAt = tuple[str, int]
"""A gauge, and the number of the place where it looks."""
MEDIAN_OF = 4096
"""The largest number of entries of which a median is taken."""
TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class Gauge:
    """A figure of a report: its formula in words, its scope, and its measurement.

    `measure` returns one number, or for "head" one for each head. By `scope`, its argument is:

    - "state": X_k (*batch, tokens, width), for each of the states X_0 .. X_K
    - "sublayer": r_k, the raw velocity of a sublayer, of the same shape
    - "head": scores (heads, rows, tokens) of the first sequence before the softmax, -inf where a
      row may not read
    - "run": the report's other figures

    It may return a tensor on its device. The monitor itself measures gauges with None.
    """

    description: str
    scope: Scope = "run"
    measure: Callable[[Any], Tensor | float] | None = None


class GaugeTable(dict[str, Gauge]):
    """Gauges by name. Raises ConfigError for a new gauge without a measurement."""

    def __setitem__(self, name: str, gauge: Gauge) -> None:
        if not callable(gauge.measure):
            raise ConfigError(
                f"nothing measures the gauge {name!r}: give Gauge(description, scope, measure) a"
                " function as measure"
            )
        super().__setitem__(name, gauge)


def root_mean_square(x: Tensor) -> Tensor:
    """|x|/sqrt(number of entries)."""
    return length(x) / math.sqrt(x.numel())


def outlier_ratio(x: Tensor) -> Tensor:
    """Largest over median |x|."""
    flat = x.flatten()
    median = flat[:: max(1, flat.numel() // MEDIAN_OF)].abs().median().float()
    return length(x, math.inf) / median.clamp(min=TINY)


def token_spread(r: Tensor) -> Tensor:
    """|r - mean over tokens|/|r|, of a sample of tokens."""
    rows = sample_rows(r)
    return length(rows - rows.mean(0)) / length(rows).clamp(min=TINY)


GAUGES = GaugeTable({
    "loss": Gauge("the loss given to `step`"),
    "highest_loss": Gauge("the largest loss since the last report"),
    "learning_rate": Gauge("the largest learning rate of the optimiser's groups"),
    "adam_memory": Gauge("1/(1 - beta_2): the steps that Adam's second moments remember"),
    "softmaxes": Gauge("softmaxes one upon another at the end of the loss's graph"),
    "gradient_norm": Gauge("|dL/dW| over all weights, as given to `step` or computed"),
    "highest_gradient_norm": Gauge("the largest gradient norm since the last report, if given to `step`"),
    "earlier_gradient": Gauge("|dL/dW| of the first sublayer when the step's first backward pass begins"),
    "gradient_outside": Gauge("|dL/dW| over the weights outside of the depth: embeddings, final norm, head"),
    "update_outside": Gauge("|W' - W|/|W| of one step, over the weights outside of the depth"),
    "adam_gradient_ratio_outside": Gauge("rms of dL/dW over the root of Adam's second moment, outside of the depth"),
    "log_z": Gauge("mean over tokens of log sum exp(logits)"),
    "largest_logit": Gauge("largest |logit|"),
    "copied": Gauge("share of tokens whose likeliest successor is the token itself"),
    "foreseen": Gauge("share of tokens whose likeliest successor is the next token of the input"),
    "growth": Gauge("p of |X_k - X_0| ~ k^p from the middle of the depth to its end"),
    "seconds": Gauge("time of a step since the last report"),
    "rms": Gauge("|X_k|/sqrt(number of entries)", "state", root_mean_square),
    "mean_abs": Gauge("mean of |x| over the entries x of X_k", "state", lambda x: length(x, 1) / x.numel()),
    "largest": Gauge("largest |x| over the entries x of X_k", "state", lambda x: length(x, math.inf)),
    "peak": Gauge("largest over median |x|", "state", outlier_ratio),
    "common": Gauge("share of |X_k|^2 that is the same for all tokens", "state", lambda x: 1 - token_spread(x) ** 2),
    "costate": Gauge("|dL/dX_k|", "state"),
    "velocity": Gauge("|r_k|/sqrt(number of entries), r_k the raw velocity", "sublayer", root_mean_square),
    "spread": Gauge("share of |r_k| that differs between tokens: |r_k - mean over tokens|/|r_k|", "sublayer", token_spread),
    "bound_share": Gauge(
        "the longest token of r_k over the bound by its norm, or by its weights if a probe computed it", "sublayer"
    ),
    "step_share": Gauge("|h r_k|/|X_k|: the length of a discrete step", "sublayer"),
    "gradient": Gauge("|dL/dW_k|", "sublayer"),
    "update": Gauge("|W_k' - W_k|/|W_k| of one step of the optimiser, of sampled entries", "sublayer"),
    "rate_share": Gauge("|lr w|/|lr_max W| over a sublayer's weights W, with w = W cut to -1 and 1", "sublayer"),
    "decay_share": Gauge("|lr decay W|/|lr_max W| over a sublayer's weights W, with their weight decay", "sublayer"),
    "unmoved": Gauge("share of a sublayer's matrices that one step of the optimiser does not change", "sublayer"),
    "adam_gradient_ratio": Gauge(
        "rms of dL/dW_k over the root of Adam's second moment, of sampled entries", "sublayer"
    ),
    "routing": Gauge("exp(entropy of experts' shares of tokens, or of first choices)/number of experts", "sublayer"),
    "logit": Gauge("largest |attention score| before the softmax", "head", largest_score),
    "ahead": Gauge("share of attention's weight on later tokens", "head", weight_ahead),
    "entropy": Gauge("mean entropy of attention rows over log(number of visible tokens)", "head", row_entropy),
})  # fmt: skip
"""All gauges. A new gauge is one entry."""
RENAMED = {"surprise": "adam_gradient_ratio", "surprise_outside": "adam_gradient_ratio_outside"}
"""Gauges by their names in logs of version 0.2."""


def measures_of(scope: Scope) -> dict[str, Callable[[Any], Tensor | float]]:
    """The measurements of gauges of that scope, by gauge, where there is one."""
    return {
        name: gauge.measure
        for name, gauge in GAUGES.items()
        if gauge.scope == scope and gauge.measure is not None
    }
