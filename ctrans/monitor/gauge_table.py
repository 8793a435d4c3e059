"""The table of a report's figures: what each is, and of what there is one."""

from __future__ import annotations

import dataclasses
from typing import Literal

Scope = Literal["run", "state", "sublayer", "head"]


@dataclasses.dataclass(frozen=True)
class Gauge:
    """A figure: what it is, as a formula, and of what there is one: the run, each state X_0 .. X_K, each sublayer, each head."""

    says: str
    scope: Scope


GAUGES: dict[str, Gauge] = {
    "loss": Gauge("the loss that `step` is given", "run"),
    "highest_loss": Gauge("the largest loss since the last report", "run"),
    "learning_rate": Gauge("the largest of the optimiser's groups", "run"),
    "gradient_norm": Gauge("|dL/dW| over all weights, as `step` is given it or finds it", "run"),
    "highest_gradient_norm": Gauge("the largest gradient norm since the last report, where `step` is given each", "run"),
    "gradient_outside": Gauge("|dL/dW| over the weights outside of the depth: embeddings, final norm, head", "run"),
    "update_outside": Gauge("|W' - W|/|W| of one step, over the weights outside of the depth", "run"),
    "surprise_outside": Gauge("rms of dL/dW over the root of Adam's second moment, outside of the depth", "run"),
    "log_z": Gauge("mean over tokens of log sum exp(logits)", "run"),
    "largest_logit": Gauge("largest |logit|", "run"),
    "growth": Gauge("p of |X_k - X_0| ~ k^p from the middle of the depth to its end", "run"),
    "seconds": Gauge("time of a step since the last report", "run"),
    "rms": Gauge("|X_k|/sqrt(number of entries)", "state"),
    "mean_abs": Gauge("mean of |x| over the entries x of X_k", "state"),
    "largest": Gauge("largest |x| over the entries x of X_k", "state"),
    "peak": Gauge("largest over median |x|", "state"),
    "costate": Gauge("|dL/dX_k|", "state"),
    "velocity": Gauge("|r_k|/sqrt(number of entries), r_k the raw velocity", "sublayer"),
    "spread": Gauge("how much of |r_k| differs between tokens: |r_k - mean over tokens|/|r_k|", "sublayer"),
    "bound_share": Gauge(
        "the longest token of r_k over what its norm allows, or its weights, where a probe looked at them", "sublayer"
    ),
    "step_share": Gauge("|h r_k|/|X_k|: how far a discrete step goes", "sublayer"),
    "gradient": Gauge("|dL/dW_k|", "sublayer"),
    "update": Gauge("|W_k' - W_k|/|W_k| of one step of the optimiser, of sampled entries", "sublayer"),
    "surprise": Gauge("rms of dL/dW_k over the root of Adam's second moment, of sampled entries", "sublayer"),
    "routing": Gauge("exp(entropy of experts' shares of tokens, or of first choices)/number of experts", "sublayer"),
    "logit": Gauge("largest |attention score| before the softmax", "head"),
    "entropy": Gauge("mean entropy of attention's rows over log(tokens that may be read)", "head"),
}
"""Everything that a report may have. A new gauge is an entry here and what measures it in `ctrans.monitor.gauges`."""

Figures = dict[str, float | list[float]]
"""A report's figures by gauge: a number for the run, a list for the others, nan where nothing was seen."""
