"""Alarms: the checks of a training, each with a measurement of the training's past.

A new alarm is one entry of `ALARMS`: its texts, and a function of the past and the limits as in
`ctrans.training.monitor.past_checks`. `Monitor(..., limits={"attention logits grow": {"limit":
100}})` changes limits for a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from ctrans.measure.findings import OURS, SEVERITIES, Check, Checks, Finding, Reading, tried
from ctrans.training.monitor import past_checks
from ctrans.training.monitor.gauge_table import GAUGES
from ctrans.training.monitor.past import Array, Past
from ctrans.training.monitor.sightings import Limits, Sighting
from solvers import ConfigError, shown, unknown

SET = (
    "our choice, set on one half of the runs of benchmarks/warning_study.py and tested on the other"
)
PROBED = ("preconditioned_over_edge",)
"""The figures of probes that checks judge. All other checks judge gauges."""
REMEMBERED = 3
"""An alarm is raised again after more than this number of reports without it."""
_GROWTH = {"window": 6, "ahead": 4.0, "fit": 0.8}
_SPIKE = {"window": 64, "recent": 8, "least": 8}
_MOMENTS = "rms of the gradient over the root of Adam's second moment"
_CONDITION = "|dL/dX_0||X_0| over |dL/dX_K||X_K|"


def _off_guessing(values: Array, past: Past) -> Array:
    """|log Z - log V|: Z is V for logits of 0."""
    return abs(values - math.log(max(2, past.vocabulary)))


def _measured(check: Check) -> bool:
    """Whether it has a measurement, and a gauge or a probe offers its quantity."""
    return check.measure is not None and (check.quantity in GAUGES or check.quantity in PROBED)


ALARMS = Checks(
    "training",
    {
        "not finite": Check(
            "rms",
            "a figure that is inf or nan",
            "broken",
            f"no figure may be inf or nan{tried(2, 2)}",
            "A step with it makes every weight nan.",
            "Go on from the last checkpoint, and skip the batches since then. If it comes again: a"
            " wider dtype, a smaller loss scale or a lower learning rate.",
            measure=past_checks.not_finite,
        ),
        "near the end of float16": Check(
            "largest",
            "largest |x| of a state in float16",
            "serious",
            "float16 ends at 65504",
            "The state will overflow to inf.",
            "Use bfloat16, a norm behind each sublayer (placement peri), or weight decay.",
            limits={"low": 128.0, "limit": 32768.0, **_GROWTH},
            measure=past_checks.half_range,
        ),
        "softmax twice": Check(
            "softmaxes",
            "softmaxes one upon another at the end of the loss's graph",
            "serious",
            f"cross-entropy has one{tried(2, 2)}",
            "The logits are between 0 and 1, so no probability can be near 1. The loss stays high,"
            " and gradients vanish.",
            "Give the loss the logits: remove the softmax before it.",
            limits={"limit": 1.0},
            measure=past_checks.beyond("softmaxes"),
        ),
        "gradients are not reset": Check(
            "earlier_gradient",
            "the first sublayer's gradient when the step's first backward pass begins",
            "note",
            "gradients of a step start from zero",
            "Each step follows the sum of earlier gradients too.",
            "Call optimizer.zero_grad() in each step. If you add up gradients of several passes,"
            " call monitor.step only before the optimiser's step. A loop with several backward"
            " passes in a step, as for a GAN or a penalty, may mean to.",
            limits={"limit": 0.0, "reports": 2},
            measure=past_checks.beyond("earlier_gradient"),
        ),
        "updates too large": Check(
            "update",
            "|W' - W|/|W| of one step, for the median sublayer",
            "serious",
            f"1e-3 is usual (Karpathy); limit: {SET}{tried(2, 0)}",
            "A few steps replace a layer's weights.",
            "Go back to the start or to a checkpoint from before. Lower the learning rate so that a"
            " step after the warm-up changes 1% of a sublayer's length. (In healthy runs of"
            " benchmarks/clinic it is 0.2% to 1.3%.)",
            limits={"limit": 0.12, "reports": 1},
            measure=past_checks.beyond("update", past_checks.median_by_depth),
        ),
        "embedding updates too large": Check(
            "update_outside",
            "|W' - W|/|W| of one step, for the weights outside of the blocks",
            "serious",
            f"{OURS}: 0.001 to 0.021 in healthy open runs of benchmarks/clinic{tried(2, 2)}",
            "The embedding, or the head, runs away from the blocks, which then read other states at"
            " each step.",
            "Go back to the start or to a checkpoint from before. Lower the learning rate of the"
            " embedding and the head to that of the blocks or below.",
            limits={"limit": 0.1, "reports": 1},
            measure=past_checks.beyond("update_outside"),
        ),
        "attention logits grow": Check(
            "logit",
            "largest |attention score|",
            "note",
            "Wortsman et al. 2023 (arXiv 2309.14322), Zhai et al. 2023 (arXiv 2303.06296); limits:"
            f" {SET}",
            "Attention's rows become one-hot. Their gradients are then zero or huge.",
            "Go on with W_Q and W_K of the size of before, and scale them back after each step at"
            " which they are larger (as QK-clip does), or use QK-norm (--qk-norm).",
            limits={"low": 15.0, "limit": 50.0, **_GROWTH},
            measure=past_checks.grows("logit"),
        ),
        "output logits drift": Check(
            "log_z",
            "|log Z - log V|",
            "serious",
            f"Chowdhery et al. 2022 (PaLM, z-loss), Wortsman et al. 2023; limits: {SET}",
            "The logits leave the range in which the softmax is exact. Late in a training this ends"
            " in divergence.",
            "Use the z-loss, weight decay, or a lower learning rate.",
            limits={"low": 15.0, "limit": 30.0, **_GROWTH},
            measure=past_checks.grows("log_z", _off_guessing),
        ),
        "embedding grows": Check(
            "rms",
            "rms of X_0 over that of the first report",
            "serious",
            SET,
            "What sublayers add becomes negligible, and every step of the ODE becomes small.",
            "Use a lower learning rate for the embedding, a longer warm-up, weight decay on it, or"
            " a norm behind it.",
            limits={"low": 25.0, "limit": 100.0, **_GROWTH},
            measure=past_checks.grows(
                "rms", lambda values, past: past_checks.over_first(values, past, "rms")[:, :1]
            ),
        ),
        "hidden states grow too large": Check(
            "rms",
            "rms of a state over that of the first report",
            "serious",
            "Kan et al. (arXiv 2510.09904): states grow in proportion to weights, or not at all;"
            f" limits: {SET}{tried(1, 1)}",
            "States overflow in half precision, and late blocks have no effect.",
            "Give the last maps of attention and FFN their size of before, and scale them back"
            " after each step at which they are larger. In a new training: a norm behind each"
            " sublayer (placement peri).",
            limits={"low": 400.0, "limit": 3000.0, **_GROWTH, "ahead": 1.0},
            measure=past_checks.grows(
                "rms", lambda values, past: past_checks.over_first(values, past, "rms")
            ),
        ),
        "gradients explode by depth": Check(
            "costate",
            _CONDITION,
            "serious",
            "the screening's limit on the condition of the backward pass (Kan's step 3)",
            "Early blocks change fast while late ones learn.",
            "Use a warm-up, a norm inside the residual branch (placement pre or peri), smaller"
            " initial weights, or a smaller dt.",
            limits={"limit": 100.0, "reports": 1},
            measure=partial(past_checks.by_depth, exploding=True),
        ),
        "gradients vanish by depth": Check(
            "costate",
            _CONDITION,
            "serious",
            f"the screening's condition, whose limit is 0.1; this one: {SET}",
            "Early blocks keep their initial weights.",
            "Use a norm inside the residual branch (placement pre or peri), a warm-up, or fewer"
            " blocks.",
            limits={"limit": 3e-4, "reports": 2},
            measure=partial(past_checks.by_depth, exploding=False),
        ),
        "updates near zero": Check(
            "update",
            "the difference of |W' - W|/|W| and the decay of one step, over the learning rate of"
            " these weights, for the median sublayer",
            "serious",
            f"{OURS}: Adam moves an entry by a tenth of the rate or more, and weights have an rms"
            " below 1; 1 to 8 in healthy open runs of benchmarks/clinic, by the largest rate of"
            f" all weights{tried(2, 2)}",
            "Nothing is learned, whatever the rate is.",
            "Check Adam's eps (1e-8 is usual), the loss's scale against that of the gradients, and"
            " the weights' dtype: in bfloat16 small steps are rounded away.",
            limits={"limit": 0.05, "reports": 3},
            measure=past_checks.slow,
        ),
        "targets leak": Check(
            "foreseen",
            "share of tokens whose likeliest successor is the next token, if attention reads later"
            " tokens; else the token itself",
            "serious",
            f"{OURS}: a causal model of text names its own token at 0.2 to 0.3 in healthy open runs"
            f" of benchmarks/clinic{tried(3, 2)}",
            "The model copies what it has to predict. Its loss falls, and it has learned nothing.",
            "Mask later tokens (is_causal=True). Shift the labels by one: the target of a token is"
            " the next one. Do nothing if a prefix is meant to read itself.",
            limits={"limit": 0.9, "margin": 0.05, "reads": 1e-3, "reports": 3},
            measure=past_checks.leak,
        ),
        "gradient spike": Check(
            "gradient_norm",
            "gradient norm",
            "note",
            f"ignite's GradMonitor, llm-foundry; limits: {SET}{tried(1, 0)}",
            "One batch moves the weights, and Adam's moments for a long time after.",
            "Inspect that batch. If other batches spike too, look for the cause in the loss, the"
            " learning rate and the attention logits: going back and skipping a batch removes none"
            " of these.",
            limits={"factor": 8.0, **_SPIKE},
            measure=past_checks.gradient_spike,
        ),
        "loss stays high": Check(
            "loss",
            "the smallest loss of the last steps against the largest of the 64 before",
            "serious",
            f"{OURS}: by chance, losses of one distribution are so ordered once in 10 million"
            f" stretches{tried(4, 4)}",
            "The data, the labels or the code are not what they were, or the model has lost what it"
            " had learned.",
            "Go back to a checkpoint from before. Compare what the loop reads since then with what"
            " it read before (labels, tokenizer, order of data), and go on with the former.",
            limits={"recent": 5, "window": 64, "least": 32},
            measure=past_checks.risen,
        ),
        "loss spike": Check(
            "loss",
            "loss",
            "serious",
            f"llm-foundry's KillLossSpike; limits: {SET}",
            "The model has lost what it had learned, or met a batch unlike the others.",
            "Inspect that batch. Go back to a checkpoint from before, and skip the batches since"
            " then.",
            limits={"factor": 12.0, "floor": 0.05, **_SPIKE},
            measure=past_checks.loss_spike,
        ),
        "Adam's second moments too small": Check(
            "adam_gradient_ratio",
            _MOMENTS,
            "note",
            "Wortsman et al. 2023 (arXiv 2304.13013): spikes follow values above 2.3",
            "The second moments remember smaller gradients, so a step has that many times the"
            " learning rate.",
            "Use a smaller beta_2 (0.95), clipping, StableAdamW, or a lower learning rate.",
            limits={"limit": 3.0, "reports": 4},
            measure=past_checks.beyond("adam_gradient_ratio", past_checks.median_by_depth),
        ),
        "Adam's second moments too large": Check(
            "adam_gradient_ratio",
            _MOMENTS,
            "note",
            OURS,
            "The second moments remember larger gradients, so a step is far smaller than the"
            " learning rate.",
            "Find out why the gradients became smaller: a loss near 0 (do targets leak?), data that"
            " repeat, or a loss scale. A smaller beta_2 makes the steps longer, and cures none of"
            " these.",
            limits={"limit": 0.15, "reports": 3},
            measure=past_checks.beyond(
                "adam_gradient_ratio", past_checks.median_by_depth, below=True
            ),
        ),
        "Adam remembers too long": Check(
            "adam_memory",
            "1/(1 - beta_2), in steps",
            "note",
            f"{OURS}: usual are 20 to 1000 (beta_2 of 0.95 to 0.999)",
            "Large gradients of long ago make steps short, and a sudden larger one meets small"
            " second moments.",
            "Use a beta_2 of 0.95 to 0.999.",
            limits={"limit": 5000.0},
            measure=past_checks.beyond("adam_memory"),
        ),
        "beyond the edge of stability": Check(
            "preconditioned_over_edge",
            "Adam's preconditioned sharpness over 2 (1 + b)/((1 - b) lr)",
            "serious",
            "Cohen et al. 2022 (arXiv 2207.14484): trainings stay near 1",
            "Steps along the sharpest direction grow.",
            "Use a longer warm-up, or a lower learning rate.",
            limits={"limit": 1.5},
            measure=past_checks.probed("preconditioned_over_edge"),
        ),
        "attention collapsed": Check(
            "entropy",
            "mean entropy of a head's rows over the largest possible",
            "note",
            "Zhai et al. 2023 (arXiv 2303.06296)",
            "The head reads one token whatever the text is, and no gradient changes that.",
            "Use QK-norm (--qk-norm), or a lower learning rate.",
            limits={"limit": 0.01, "reports": 2},
            measure=past_checks.beyond("entropy", below=True),
        ),
        "step larger than the state": Check(
            "step_share",
            "|h r_k|/|X_k|, for the median sublayer",
            "note",
            "an Euler step as long as the state is far from its ODE",
            "Every sublayer replaces the state, so gradients pass through the maps alone.",
            "Use a smaller dt, a larger embedding, or smaller gains of output norms.",
            limits={"limit": 1.0, "reports": 2},
            measure=past_checks.beyond("step_share", past_checks.median_by_depth),
        ),
        "dead layer": Check(
            "velocity",
            "a sublayer's velocity or gradient over the median sublayer's, or the share of its"
            " velocity that differs by token",
            "note",
            OURS,
            "The layer adds nothing, or learns nothing.",
            "Look for a path cut by detach(), and remove it. Set gains near 0 back to 1. Draw units"
            " that are always off again, with output weights of 0.",
            limits={"limit": 1e-4, "same": 1e-3, "reports": 2},
            measure=past_checks.dead,
        ),
        "sublayer outgrows its past": Check(
            "velocity",
            "a sublayer's velocity over the median of its reports before, over that of the median"
            " sublayer",
            "note",
            f"{OURS}: at most 3.9 in 8 healthy trainings of the open half of benchmarks/clinic, at"
            " least 28 after weights times 50 with no norm behind",
            "One sublayer outweighs the others, as after a weight was changed from outside.",
            "Compare the weights with those of the last checkpoint (`ctrans diagnose OLD NEW`), and"
            " restore what nobody meant to change.",
            limits={"limit": 10.0, "reports": 2, "least": 12},
            measure=past_checks.outgrown,
        ),
        "frozen layer": Check(
            "unmoved",
            "share of a sublayer's matrices that a step does not change",
            "note",
            "any matrix that no step moves, where most sublayers have none",
            "These matrices keep their weights.",
            "Give its parameters to the optimiser. Check requires_grad, and whether it was made"
            " after the optimiser.",
            limits={"share": 0.34, "reports": 2},
            measure=past_checks.frozen,
        ),
        "router collapse": Check(
            "routing",
            "exp(entropy of experts' shares of tokens)/experts",
            "note",
            "Shazeer et al. 2017 (arXiv 1701.06538): load balancing",
            "Few experts are trained. The others keep their initial weights.",
            "Draw the router's weights again, and use a load-balancing loss or bias, noise on the"
            " router, or a router z-loss.",
            limits={"limit": 0.3, "reports": 2},
            measure=past_checks.beyond("routing", below=True),
        ),
    },
    _measured,
)
"""Alarms by name, in the order of reports: causes before their consequences."""


def check_limits(changes: Mapping[str, Mapping[str, float]]) -> dict[str, Limits]:
    """The limits of all alarms, with these changes of the defaults. Raises ConfigError with the
    nearest name for an unknown one.
    """
    for name, limits in changes.items():
        if name not in ALARMS:
            raise unknown("alarm", name, ALARMS)
        for key, value in limits.items():
            if key not in ALARMS[name].limits:
                raise unknown(f"limit of {name!r}", key, ALARMS[name].limits)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                raise ConfigError(f"limit {key!r} of {name!r} is {shown(value)}: give a number")
    return {name: {**check.limits, **changes.get(name, {})} for name, check in ALARMS.items()}


class Watch:
    """The alarms of a run. Each is reported when it begins, and again after a pause of `REMEMBERED`
    reports.
    """

    def __init__(self, limits: Mapping[str, Mapping[str, float]] | None = None):
        self.limits = check_limits(limits or {})
        self._last: dict[str, int] = {}
        self._count = 0

    def memory(self) -> dict[str, Any]:
        """The reported alarms and their times, for a resumed run."""
        return {"last": dict(self._last), "count": self._count}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Continues from a result of `memory`."""
        self._last = dict(memory["last"])
        self._count = int(memory["count"])

    def look(self, past: Past) -> list[Finding]:
        """The new alarms of the last report, with notes last."""
        self._count += 1
        findings = []
        for name, check in ALARMS.items():
            assert check.measure is not None, "`ALARMS` has no alarm without a measurement"
            sighting = check.measure(past, self.limits[name])
            if sighting is None:
                continue
            quiet = self._count - self._last.get(name, -REMEMBERED - 1)
            self._last[name] = self._count
            if quiet > REMEMBERED:
                findings.append(_finding(name, sighting, past.step))
        return sorted(findings, key=lambda finding: finding.severity == SEVERITIES[-1])


def _finding(name: str, sighting: Sighting, step: int) -> Finding:
    figure = f"{ALARMS[name].description} = {sighting.value:.3g}"
    if not math.isfinite(sighting.limit):
        limit = ""
    elif sighting.below:
        limit = f"below {sighting.limit:.3g}"
    else:
        limit = f"above {sighting.limit:.3g}"
    doubling = None
    if sighting.doubling < 1e6:
        doubling = sighting.doubling
    crossing = None
    if sighting.crossing < 1e9:
        crossing = round(sighting.crossing)
    return ALARMS.finding(
        name,
        Reading(sighting.value, sighting.place, figure),
        limit=limit,
        step=step,
        since=sighting.since,
        doubling=doubling,
        crossing=crossing,
    )
