"""Alarms: what can go wrong with a training, as one table of rules with their limits, sources and remedies.

A new alarm is one entry: a check from `ctrans.monitor.checks`, or a function of the past and limits, and words. `Monitor(...,
limits={"attention logits grow": {"limit": 100}})` sets limits of a run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from ctrans.monitor import checks
from ctrans.monitor.checks import Limits, PastCheck, Sighting
from ctrans.monitor.past import Array, Past
from solvers import ConfigError
from solvers.errors import unknown

Grade = Literal["danger", "notice"]
"""Danger: the run may be lost. Notice: worth knowing, and often meant so."""
OURS = "our choice"
SET = "our choice, set on one half of the runs of benchmarks/warning_study.py and tried on the other"
REMEMBERED = 3
"""An alarm that was quiet for so many reports is raised again."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """An alarm where `check` sees something. `says` is the figure, `does` what it leads to, `source` who set the limits."""

    says: str
    check: PastCheck
    limits: Limits
    grade: Grade
    source: str
    does: str
    helps: str


@dataclasses.dataclass(frozen=True)
class Alarm:
    """What, where, since when, how fast, and what helps. Every field suits JSON.

    `step` is when it was raised and `since` when it began; `doubling` is in steps, None for what does not grow; `crossing` is the step
    at which it passes `limit` if it goes on so, None where that is not known.
    """

    rule: str
    grade: Grade
    step: int
    place: str
    says: str
    value: float
    limit: float
    since: int
    doubling: float | None
    crossing: int | None
    does: str
    helps: str
    source: str

    def __str__(self) -> str:
        fast = f", doubles every {self.doubling:.0f} steps" if self.doubling is not None else ""
        if self.crossing is not None and self.crossing > self.step:
            fast += f" and passes {self.limit:.3g} at about step {self.crossing}"
        elif math.isfinite(self.limit) and self.limit:
            fast += f" (limit {self.limit:.3g})"
        since = f", since step {self.since}" if self.since < self.step else ""
        what = f"step {self.step}: {self.rule}: {self.place}: {self.says} = {self.value:.3g}{fast}{since}"
        return f"{what}. It {self.does}. Helps: {self.helps}"


def _off_guessing(values: Array, past: Past) -> Array:
    """|log Z - log V|: Z is V for logits of 0."""
    return abs(values - math.log(max(2, past.vocabulary)))


ALARMS: dict[str, Rule] = {
    "not finite": Rule(
        "a figure that is inf or nan",
        checks.not_finite,
        {},
        "danger",
        "any is too many",
        "makes every weight nan with the next step",
        "skip the step, a wider dtype or a smaller loss scale, a lower learning rate from the last checkpoint",
    ),
    "near the end of float16": Rule(
        "largest |x| of a state in float16",
        checks.half_range,
        {"low": 128.0, "limit": 32768.0, "window": 6, "ahead": 4.0, "fit": 0.8},
        "danger",
        "float16 ends at 65504",
        "overflows to inf",
        "bfloat16, a norm behind each sublayer (placement peri), weight decay",
    ),
    "attention logits grow": Rule(
        "largest |attention score|",
        checks.grows("logit"),
        {"low": 15.0, "limit": 50.0, "window": 6, "ahead": 4.0, "fit": 0.8},
        "notice",
        f"Wortsman et al. 2023 (arXiv 2309.14322), Zhai et al. 2023 (arXiv 2303.06296); limits: {SET}",
        "makes attention's rows one-hot, whose gradients are zero or huge",
        "QK-norm (--qk-norm), a lower learning rate or a longer warm-up, weight decay on queries and keys",
    ),
    "output logits adrift": Rule(
        "|log Z - log V|",
        checks.grows("log_z", _off_guessing),
        {"low": 15.0, "limit": 30.0, "window": 6, "ahead": 4.0, "fit": 0.8},
        "danger",
        f"Chowdhery et al. 2022 (PaLM, z-loss), Wortsman et al. 2023; limits: {SET}",
        "leaves the range in which the softmax is exact, and late in training ends in divergence",
        "z-loss, weight decay, a lower learning rate",
    ),
    "embedding grows": Rule(
        "rms of X_0 over that of the first report",
        checks.grows("rms", lambda values, past: checks.over_first(values, past, "rms")[:, :1]),
        {"low": 25.0, "limit": 100.0, "window": 6, "ahead": 4.0, "fit": 0.8},
        "danger",
        SET,
        "drowns what sublayers add, and makes every step of the ODE small",
        "a lower learning rate for the embedding, a longer warm-up, weight decay on it, or a norm behind it",
    ),
    "hidden states outrun their law": Rule(
        "rms of a state over that of the first report",
        checks.grows("rms", lambda values, past: checks.over_first(values, past, "rms")),
        {"low": 400.0, "limit": 3000.0, "window": 6, "ahead": 1.0, "fit": 0.8},
        "danger",
        f"Kan et al. (arXiv 2510.09904): states grow in proportion to weights, or not at all; limits: {SET}",
        "overflows in half precision, and makes late blocks do nothing",
        "a norm behind each sublayer (placement peri), a lower learning rate, weight decay",
    ),
    "gradients explode by depth": Rule(
        "|dL/dX_0||X_0| over |dL/dX_K||X_K|",
        partial(checks.by_depth, exploding=True),
        {"limit": 100.0, "reports": 1},
        "danger",
        "the screening's limit on the condition of the way back (Kan's step 3)",
        "makes early blocks jump while late ones learn",
        "a warm-up, a norm inside the residual branch (placement pre or peri), smaller initial weights, a smaller dt",
    ),
    "gradients die by depth": Rule(
        "|dL/dX_0||X_0| over |dL/dX_K||X_K|",
        partial(checks.by_depth, exploding=False),
        {"limit": 3e-4, "reports": 2},
        "danger",
        f"the screening's condition, whose limit is 0.1; this one: {SET}",
        "leaves early blocks as they were drawn",
        "a norm inside the residual branch (placement pre or peri), a warm-up, fewer blocks",
    ),
    "gradient spike": Rule(
        "gradient norm",
        checks.gradient_spike,
        {"factor": 8.0, "window": 64, "recent": 8, "least": 8},
        "notice",
        f"ignite's GradMonitor, llm-foundry; limits: {SET}",
        "moves the weights, and Adam's moments for long after, in the direction of one batch",
        "look at that batch; clip, skip such steps (react=('skip',)), a lower learning rate",
    ),
    "loss spike": Rule(
        "loss",
        checks.loss_spike,
        {"factor": 12.0, "floor": 0.05, "window": 64, "recent": 8, "least": 8},
        "danger",
        f"llm-foundry's KillLossSpike; limits: {SET}",
        "has left what it had learned, or met a batch unlike others",
        "look at that batch; go back to a checkpoint from before and skip it, or lower the learning rate",
    ),
    "updates too large": Rule(
        "|W' - W|/|W| of one step, the median sublayer's",
        checks.beyond("update", checks.median_by_depth),
        {"limit": 0.12, "reports": 1},
        "danger",
        f"1e-3 is usual (Karpathy); limit: {SET}",
        "replaces a layer's weights in a few steps",
        "a lower learning rate or a longer warm-up, larger initial weights",
    ),
    "second moments lag": Rule(
        "rms of the gradient over the root of Adam's second moment",
        checks.beyond("surprise", checks.median_by_depth),
        {"limit": 3.0, "reports": 4},
        "notice",
        "Wortsman et al. 2023 (arXiv 2304.13013): spikes follow values above 2.3",
        "makes steps of that many learning rates, as the second moments remember smaller gradients",
        "a smaller beta_2 (0.95), clipping, StableAdamW, a lower learning rate",
    ),
    "second moments remember too long": Rule(
        "rms of the gradient over the root of Adam's second moment",
        checks.beyond("surprise", checks.median_by_depth, below=True),
        {"limit": 0.15, "reports": 3},
        "notice",
        OURS,
        "makes steps far smaller than the learning rate, as the second moments remember larger gradients",
        "a smaller beta_2, a longer warm-up",
    ),
    "edge of stability left": Rule(
        "Adam's preconditioned sharpness over 2 (1 + b)/((1 - b) lr)",
        checks.probed("preconditioned_over_edge"),
        {"limit": 1.5},
        "danger",
        "Cohen et al. 2022 (arXiv 2207.14484): trainings hover at 1",
        "lets steps along the sharpest direction grow",
        "a longer warm-up, a lower learning rate",
    ),
    "attention collapsed": Rule(
        "mean entropy of a head's rows over the largest possible",
        checks.beyond("entropy", below=True),
        {"limit": 0.01, "reports": 2},
        "notice",
        "Zhai et al. 2023 (arXiv 2303.06296)",
        "reads one token whatever it says, so that no gradient changes that",
        "QK-norm (--qk-norm), a lower learning rate",
    ),
    "discrete step far from the ODE's": Rule(
        "|h r_k|/|X_k|, the median sublayer's",
        checks.beyond("step_share", checks.median_by_depth),
        {"limit": 1.0, "reports": 2},
        "notice",
        "an Euler step as long as the state is none of its ODE",
        "replaces the state at every sublayer, so that gradients pass by the maps alone",
        "a smaller dt, a larger embedding, smaller gains of output norms",
    ),
    "dead layer": Rule(
        "a sublayer's velocity or gradient over the median sublayer's, or what of its velocity differs by token",
        checks.dead,
        {"limit": 1e-4, "same": 1e-3, "reports": 2},
        "notice",
        OURS,
        "adds nothing, or learns nothing",
        "look for dead gains (ctrans diagnose), units that never fire, or a path cut by detach()",
    ),
    "frozen layer": Rule(
        "|W' - W| of one step",
        checks.frozen,
        {"share": 0.34, "reports": 2},
        "notice",
        "any layer that no step moves, where most are moved",
        "is as it was drawn",
        "give its parameters to the optimiser; look at requires_grad, and whether it was made after the optimiser",
    ),
    "router collapse": Rule(
        "exp(entropy of experts' shares of tokens)/experts",
        checks.beyond("routing", below=True),
        {"limit": 0.3, "reports": 2},
        "notice",
        "Shazeer et al. 2017 (arXiv 1701.06538): load balancing",
        "trains few experts and leaves the others as they were drawn",
        "a load-balancing loss or bias, noise on the router, a router z-loss",
    ),
}
"""In the order in which they are told; of what happens together, causes come before what they lead to."""


def check_limits(given: Mapping[str, Mapping[str, float]]) -> dict[str, Limits]:
    """The limits of all rules with those that are given in their place. ConfigError with the nearest name for an unknown one."""
    for name, limits in given.items():
        if name not in ALARMS:
            raise unknown("alarm", name, ALARMS)
        for key, value in limits.items():
            if key not in ALARMS[name].limits:
                raise unknown(f"limit of {name!r}", key, ALARMS[name].limits)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                raise ConfigError(f"limit {key!r} of {name!r} is {value!r}: give a number")
    return {name: {**rule.limits, **given.get(name, {})} for name, rule in ALARMS.items()}


class Watch:
    """The rules over a run: what is told once, and again when it had been quiet."""

    def __init__(self, limits: Mapping[str, Mapping[str, float]] | None = None):
        self.limits = check_limits(limits or {})
        self._last: dict[str, int] = {}
        self._count = 0

    def memory(self) -> dict[str, Any]:
        """What has been told, and when, for a run that goes on."""
        return {"last": dict(self._last), "count": self._count}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Goes on from what `memory` gave."""
        self._last, self._count = dict(memory["last"]), int(memory["count"])

    def look(self, past: Past) -> list[Alarm]:
        """The alarms that are new in the last report, dangers first."""
        self._count += 1
        found = []
        for name, rule in ALARMS.items():
            sighting = rule.check(past, self.limits[name])
            if sighting is None:
                continue
            quiet = self._count - self._last.get(name, -REMEMBERED - 1)
            self._last[name] = self._count
            if quiet > REMEMBERED:
                found.append(_alarm(name, rule, sighting, past.step))
        return sorted(found, key=lambda alarm: alarm.grade != "danger")


def _alarm(name: str, rule: Rule, sighting: Sighting, step: int) -> Alarm:
    doubling = sighting.doubling if math.isfinite(sighting.doubling) and sighting.doubling < 1e6 else None
    crossing = round(sighting.crossing) if math.isfinite(sighting.crossing) and sighting.crossing < 1e9 else None
    return Alarm(
        name,
        rule.grade,
        step,
        sighting.place,
        rule.says,
        sighting.value,
        sighting.limit,
        sighting.since,
        doubling,
        crossing,
        rule.does,
        rule.helps,
        rule.source,
    )
