"""What a monitor measures of a running training, with the limits that make its alarms.

A new measure of a training is one entry: its formula, what it is of, a function, and `live=True`.
The log has it, and the picture. With a check that has a `rule` over the past it is an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ctrans.measure import state_measures
from ctrans.measure.findings import OURS, Check, record_of
from ctrans.measure.measures import MEASURES, Chosen, Figures, Measure, MeasureAt, Scope
from ctrans.measure.reductions import SAMPLE
from ctrans.training.monitor import past_checks
from ctrans.training.monitor.past import Array, Past
from ctrans.training.monitor.scores import largest_score, row_entropy

GaugeAt = MeasureAt
__all__ = [
    "GAUGES",
    "TINY",
    "Figures",
    "GaugeAt",
    "Scope",
    "measures_of",
]
TINY = state_measures.TINY
SET = (
    "our choice, set on one half of the runs of benchmarks/warning_study.py and tested on the other"
)
_GROWTH = {"window": 6, "ahead": 4.0, "fit": 0.8}
_SPIKE = {"window": 64, "recent": 8, "least": 8}
_MOMENTS = "rms of the gradient over the root of Adam's second moment"
_CONDITION = "|dL/dX_0||X_0| over |dL/dX_K||X_K|"


def _off_guessing(values: Array, past: Past) -> Array:
    """|log Z - log V|: Z is V for logits of 0."""
    return abs(values - math.log(max(2, past.vocabulary)))


MEASURES.add(
    "the monitor",
    {
        "loss": Measure(
            formula="the loss given to `step`",
            checks={
                "loss stays high": Check(
                    severity="serious",
                    source=(
                        f"{OURS}: by chance, losses of one distribution are so ordered once in 10"
                        f" million stretches{record_of(4, 4)}"
                    ),
                    impact=(
                        "The data, the labels or the code are not what they were, or the model has"
                        " lost what it had learned."
                    ),
                    remediation=(
                        "Go back to a checkpoint from before. Compare what the loop reads since"
                        " then with what it read before (labels, tokenizer, order of data), and go"
                        " on with the former."
                    ),
                    limits={"recent": 5, "window": 64, "least": 32},
                    rule=past_checks.risen,
                    description=(
                        "the smallest loss of the last steps against the largest of the 64 before"
                    ),
                ),
                "loss spike": Check(
                    severity="serious",
                    source=f"llm-foundry's KillLossSpike; limits: {SET}",
                    impact=(
                        "The model has lost what it had learned, or met a batch unlike the others."
                    ),
                    remediation=(
                        "Inspect that batch. Go back to a checkpoint from before, and skip the"
                        " batches since then."
                    ),
                    limits={"factor": 12.0, "floor": 0.05, **_SPIKE},
                    rule=past_checks.loss_spike,
                    description="loss",
                ),
            },
            live=True,
            title="loss",
            unit="loss, nats a token",
            log=False,
        ),
        "highest_loss": Measure(
            formula="the largest loss since the last report",
            live=True,
            title="highest loss",
            unit="largest loss since the report before",
            log=False,
        ),
        "learning_rate": Measure(
            formula="the largest learning rate of the optimiser's groups",
            checks={
                "learning rate has ended": Check(
                    severity="note",
                    source=f"{OURS}; a cosine to 0 passes this in its last 2% of the steps",
                    impact="The steps go on, and the weights hardly move.",
                    remediation=(
                        "See how many steps the schedule has: is it for fewer epochs, or stepped"
                        " once a micro-batch? Else end the run here."
                    ),
                    limits={"share": 1e-3, "reports": 3},
                    rule=past_checks.ended,
                    condition="below 0.001 of the largest so far, in each of three reports",
                    description="the learning rate over the largest one so far",
                )
            },
            live=True,
            title="learning rate",
            unit="learning rate",
        ),
        "adam_memory": Measure(
            formula="1/(1 - beta_2): the steps that Adam's second moments remember",
            checks={
                "Adam remembers too long": Check(
                    severity="note",
                    source=f"{OURS}: usual are 20 to 1000 (beta_2 of 0.95 to 0.999)",
                    impact=(
                        "Large gradients of long ago make steps short, and a sudden larger one"
                        " meets small second moments."
                    ),
                    remediation="Use a beta_2 of 0.95 to 0.999.",
                    limits={"limit": 5000.0},
                    rule=past_checks.beyond("adam_memory"),
                    description="1/(1 - beta_2), in steps",
                )
            },
            live=True,
        ),
        "softmaxes": Measure(
            formula="softmaxes one upon another at the end of the loss's graph",
            checks={
                "softmax twice": Check(
                    severity="serious",
                    source=f"cross-entropy has one{record_of(2, 2)}",
                    impact=(
                        "The logits are between 0 and 1, so no probability can be near 1. The loss"
                        " stays high, and gradients vanish."
                    ),
                    remediation="Give the loss the logits: remove the softmax before it.",
                    limits={"limit": 1.0},
                    rule=past_checks.beyond("softmaxes"),
                )
            },
            live=True,
        ),
        "gradient_norm": Measure(
            formula="|dL/dW| over all weights, as given to `step` or computed",
            checks={
                "gradient spike": Check(
                    severity="note",
                    source=f"ignite's GradMonitor, llm-foundry; limits: {SET}{record_of(1, 0)}",
                    impact="One batch moves the weights, and Adam's moments for a long time after.",
                    remediation=(
                        "Inspect that batch. If other batches spike too, look for the cause in the"
                        " loss, the learning rate and the attention logits: going back and skipping"
                        " a batch removes none of these."
                    ),
                    limits={"factor": 8.0, **_SPIKE},
                    rule=past_checks.gradient_spike,
                    description="gradient norm",
                )
            },
            live=True,
            title="gradient of all weights",
            unit="|dL/dW|, all weights",
        ),
        "highest_gradient_norm": Measure(
            formula="the largest gradient norm since the last report, if given to `step`",
            live=True,
            title="highest gradient",
            unit="largest |dL/dW| since the report before",
        ),
        "earlier_gradient": Measure(
            formula="|dL/dW| of the first sublayer when the step's first backward pass begins",
            checks={
                "gradients are not reset": Check(
                    severity="note",
                    source="gradients of a step start from zero",
                    impact="Each step follows the sum of earlier gradients too.",
                    remediation=(
                        "Call optimizer.zero_grad() in each step. If you add up gradients of"
                        " several passes, call monitor.step only before the optimiser's step. A"
                        " loop with several backward passes in a step, as for a GAN or a penalty,"
                        " may mean to."
                    ),
                    limits={"limit": 0.0, "reports": 2},
                    rule=past_checks.beyond("earlier_gradient"),
                    description=(
                        "the first sublayer's gradient when the step's first backward pass begins"
                    ),
                )
            },
            live=True,
        ),
        "gradient_outside": Measure(
            formula="|dL/dW| over the weights outside of the depth: embeddings, final norm, head",
            live=True,
        ),
        "update_outside": Measure(
            formula=(
                "|W' - W|/|W| of one step, over the weights outside of the depth, of sampled"
                " entries"
            ),
            checks={
                "embedding updates too large": Check(
                    severity="serious",
                    source=(
                        f"{OURS}: 0.001 to 0.021 in healthy open runs of"
                        f" benchmarks/clinic{record_of(2, 2)}"
                    ),
                    impact=(
                        "The embedding, or the head, runs away from the blocks, which then read"
                        " other states at each step."
                    ),
                    remediation=(
                        "Go back to the start or to a checkpoint from before. Lower the learning"
                        " rate of the embedding and the head to that of the blocks or below."
                    ),
                    limits={"limit": 0.1, "reports": 1},
                    rule=past_checks.beyond("update_outside"),
                    description="|W' - W|/|W| of one step, for the weights outside of the blocks",
                )
            },
            live=True,
        ),
        "adam_gradient_ratio_outside": Measure(
            formula=(
                "rms of dL/dW, with a decay that is added to it, over the root of Adam's second"
                " moment, outside of the depth, of sampled entries"
            ),
            live=True,
        ),
        "log_z": Measure(
            formula=(
                f"mean of log sum exp(logits) over the first {SAMPLE} tokens of a step's first"
                " micro-batch"
            ),
            checks={
                "output logits drift": Check(
                    severity="serious",
                    source=(
                        f"Chowdhery et al. 2022 (PaLM, z-loss), Wortsman et al. 2023; limits: {SET}"
                    ),
                    impact=(
                        "The logits leave the range in which the softmax is exact. Late in a"
                        " training this ends in divergence."
                    ),
                    remediation="Use the z-loss, weight decay, or a lower learning rate.",
                    limits={"low": 15.0, "limit": 30.0, **_GROWTH},
                    rule=past_checks.grows("log_z", _off_guessing),
                    description="|log Z - log V|",
                )
            },
            live=True,
        ),
        "largest_logit": Measure(
            formula="largest |logit| of a step's first micro-batch",
            live=True,
            title="largest logit",
            unit="largest |logit|",
        ),
        "copied": Measure(
            formula=(
                "share of tokens whose likeliest successor is the token itself, over the first"
                f" sequences, of {SAMPLE} tokens together or one"
            ),
            live=True,
        ),
        "foreseen": Measure(
            formula=(
                "share of tokens whose likeliest successor is the next token of the input, over the"
                f" first sequences, of {SAMPLE} tokens together or one"
            ),
            checks={
                "targets leak": Check(
                    severity="serious",
                    source=(
                        f"{OURS}: a causal model of text names its own token at 0.2 to 0.3 in"
                        f" healthy open runs of benchmarks/clinic{record_of(3, 2)}"
                    ),
                    impact=(
                        "The model copies what it has to predict. Its loss falls, and it has"
                        " learned nothing."
                    ),
                    remediation=(
                        "Mask later tokens (is_causal=True). Shift the labels by one: the target of"
                        " a token is the next one. Do nothing if a prefix is meant to read itself."
                    ),
                    limits={"limit": 0.9, "margin": 0.05, "reads": 1e-3, "reports": 3},
                    rule=past_checks.leak,
                    description=(
                        "share of tokens whose likeliest successor is the next token, if attention"
                        " reads later tokens; else the token itself"
                    ),
                )
            },
            live=True,
        ),
        "growth": Measure(
            formula=(
                "p of |X_k - X_0| ~ k^p from the middle of the depth to its end, at the first"
                f" {SAMPLE} tokens"
            ),
            live=True,
        ),
        "seconds": Measure(formula="time of a step since the last report", live=True),
        "bound_share": Measure(
            formula=(
                "the longest token of r_k over the bound by its norm, or by its weights if a probe"
                " computed it"
            ),
            scope="sublayer",
            live=True,
            title="used of the bound",
            unit="share of what norm or weights allow",
        ),
        "step_share": Measure(
            formula=(
                "|h r_k|/|X_k|: the length of a discrete step; in a step's first micro-batch. Where"
                f" h may be a weight it is fitted to X_k+1 - X_k at the first {SAMPLE} tokens"
            ),
            scope="sublayer",
            checks={
                "step larger than the state": Check(
                    severity="note",
                    source="an Euler step as long as the state is far from its ODE",
                    impact=(
                        "Every sublayer replaces the state, so gradients pass through the maps"
                        " alone."
                    ),
                    remediation=(
                        "Use a smaller dt, a larger embedding, or smaller gains of output norms."
                    ),
                    limits={"limit": 1.0, "reports": 2},
                    rule=past_checks.beyond("step_share", past_checks.median_by_depth),
                    description="|h r_k|/|X_k|, for the median sublayer",
                )
            },
            live=True,
            title="length of a step",
            unit="|dt r| / |X|, of what is added",
        ),
        "gradient": Measure(
            formula="|dL/dW_k|",
            scope="sublayer",
            live=True,
            title="gradients",
            unit="norm of a sublayer's, |dL/dW|",
        ),
        "update": Measure(
            formula="|W_k' - W_k|/|W_k| of one step of the optimiser, of sampled entries",
            scope="sublayer",
            checks={
                "updates too large": Check(
                    severity="serious",
                    source=f"1e-3 is usual (Karpathy); limit: {SET}{record_of(2, 0)}",
                    impact="A few steps replace a layer's weights.",
                    remediation=(
                        "Go back to the start or to a checkpoint from before. Lower the learning"
                        " rate so that a step after the warm-up changes 1% of a sublayer's length."
                        " (In healthy runs of benchmarks/clinic it is 0.2% to 1.3%.)"
                    ),
                    limits={"limit": 0.12, "reports": 1},
                    rule=past_checks.beyond("update", past_checks.median_by_depth),
                    description="|W' - W|/|W| of one step, for the median sublayer",
                ),
                "nothing moves": Check(
                    severity="serious",
                    source="exact: no sampled entry of any weight changes in eight reports",
                    impact="Nothing is learned: the reported steps change no sampled weight.",
                    remediation=(
                        "Check that the optimiser was made with the parameters of this model (not"
                        " of one that was loaded, moved or wrapped since), that its learning rate"
                        " is above 0 (a schedule that counts epochs starts at 0 for a whole one),"
                        " and that optimizer.step is called."
                    ),
                    limits={"reports": 8},
                    rule=past_checks.still,
                    condition="0 in each of eight reports, for all weights",
                    description="|W' - W|/|W| of one step, for all weights",
                ),
                "updates near zero": Check(
                    severity="serious",
                    source=(
                        f"{OURS}: Adam moves an entry by a tenth of the rate or more, and weights"
                        " have an rms below 1; 1 to 8 in healthy open runs of benchmarks/clinic,"
                        f" by the largest rate of all weights{record_of(2, 2)}"
                    ),
                    impact="Nothing is learned, whatever the rate is.",
                    remediation=(
                        "Check Adam's eps (1e-8 is usual), the loss's scale and the limit of"
                        " clipping against the gradients' norm, and the weights' dtype: in bfloat16"
                        " small steps are rounded away."
                    ),
                    limits={"limit": 0.05, "reports": 3},
                    rule=past_checks.slow,
                    description=(
                        "the difference of |W' - W|/|W| and the decay of one step, over the"
                        " learning rate of these weights, for the median sublayer"
                    ),
                ),
            },
            live=True,
            title="updates",
            unit="|change of W| / |W|, one step",
        ),
        "rate_share": Measure(
            formula="|lr w|/|lr_max W| over a sublayer's weights W, with w = W cut to -1 and 1",
            scope="sublayer",
            live=True,
        ),
        "decay_share": Measure(
            formula=(
                "|lr decay W|/|lr_max W| over a sublayer's weights W, with their weight decay, over"
                " 1 - momentum for SGD; without one that is added to the gradient before Adam's"
                " moments"
            ),
            scope="sublayer",
            live=True,
        ),
        "unmoved": Measure(
            formula="share of a sublayer's matrices that one step of the optimiser does not change",
            scope="sublayer",
            checks={
                "frozen layer": Check(
                    severity="note",
                    source="any matrix that no step moves, where most sublayers have none",
                    impact="These matrices keep their weights.",
                    remediation=(
                        "Give its parameters to the optimiser. Check requires_grad, and whether it"
                        " was made after the optimiser."
                    ),
                    limits={"share": 0.34, "reports": 2},
                    rule=past_checks.frozen,
                    description="share of a sublayer's matrices that a step does not change",
                )
            },
            live=True,
        ),
        "adam_gradient_ratio": Measure(
            formula=(
                "rms of dL/dW_k, with a decay that is added to it, over the root of Adam's second"
                " moment, of sampled entries"
            ),
            scope="sublayer",
            checks={
                "Adam's second moments too small": Check(
                    severity="note",
                    source=(
                        "Wortsman et al. 2023 (arXiv 2304.13013): spikes follow values above 2.3"
                    ),
                    impact=(
                        "The second moments remember smaller gradients, so a step has that many"
                        " times the learning rate."
                    ),
                    remediation=(
                        "Use a smaller beta_2 (0.95), clipping, StableAdamW, or a lower learning"
                        " rate."
                    ),
                    limits={"limit": 3.0, "reports": 4},
                    rule=past_checks.beyond("adam_gradient_ratio", past_checks.median_by_depth),
                    description=(_MOMENTS),
                ),
                "Adam's second moments too large": Check(
                    severity="note",
                    source=OURS,
                    impact=(
                        "The second moments remember larger gradients, so a step is far smaller"
                        " than the learning rate."
                    ),
                    remediation=(
                        "Find out why the gradients became smaller: a loss near 0 (do targets"
                        " leak?), data that repeat, or a loss scale. A smaller beta_2 makes the"
                        " steps longer, and cures none of these."
                    ),
                    limits={"limit": 0.15, "reports": 3},
                    rule=past_checks.beyond(
                        "adam_gradient_ratio", past_checks.median_by_depth, below=True
                    ),
                    description=(_MOMENTS),
                ),
            },
            live=True,
            title="gradients for Adam",
            unit="gradient / root of Adam's second moment",
        ),
        "routing": Measure(
            formula=(
                "exp(entropy of experts' shares of tokens)/number of experts, in ctrans's own maps"
                f" of the first {SAMPLE} tokens, in others of the first choices of all tokens"
            ),
            scope="sublayer",
            checks={
                "router collapse": Check(
                    severity="note",
                    source=(
                        f"{OURS}, set on benchmarks/routers.py: at least 0.91 of its past in"
                        " healthy trainings, at most 0.72 where a router is forced onto one expert"
                    ),
                    impact="Few experts are trained. The others keep their weights.",
                    remediation=(
                        "Draw the router's weights again, and use a load-balancing loss or bias,"
                        " noise on the router, or a router z-loss."
                    ),
                    limits={"share": 0.8, "reports": 2, "least": 12, "limit": 0.3, "low": 1.25},
                    rule=past_checks.collapsed,
                    condition="below 0.8 of its past, or below 0.3 and never more even",
                    description="exp(entropy of experts' shares of tokens)/experts",
                )
            },
            live=True,
            title="experts used",
            unit="share of the experts",
        ),
        "logit": Measure(
            formula=(
                "largest |attention score| as the softmax gets it, over up to 64 rows of the first"
                " sequence"
            ),
            scope="head",
            compute=largest_score,
            checks={
                "attention logits grow": Check(
                    severity="note",
                    source=(
                        "Wortsman et al. 2023 (arXiv 2309.14322), Zhai et al. 2023 (arXiv"
                        f" 2303.06296); limits: {SET}"
                    ),
                    impact=(
                        "Attention's rows become one-hot. Their gradients are then zero or huge."
                    ),
                    remediation=(
                        "Go on with W_Q and W_K of the size of before, and scale them back after"
                        " each step at which they are larger (as QK-clip does), or use QK-norm"
                        " (--qk-norm)."
                    ),
                    # no forecast: in healthy trainings scores grow past 15 and stay below 50
                    limits={"limit": 50.0},
                    rule=past_checks.beyond("logit"),
                    description="largest |attention score|",
                )
            },
            live=True,
            title="attention scores",
            unit="largest |score|",
        ),
        "ahead": Measure(
            formula=(
                "share of attention's weight on later tokens, over up to 64 rows of the first"
                " sequence; with sinks, memory keys or a cache 0 behind a causal mask, else"
                " unknown, as for torch's multi-head attention to another sequence"
            ),
            scope="head",
            live=True,
        ),
        "entropy": Measure(
            formula=(
                "mean entropy of attention rows over log(number of visible keys: tokens, sinks,"
                " memory), over up to 64 rows of the first sequence"
            ),
            scope="head",
            compute=row_entropy,
            checks={
                "attention collapsed": Check(
                    severity="note",
                    source="Zhai et al. 2023 (arXiv 2303.06296)",
                    impact=(
                        "The head reads one token whatever the text is, and no gradient changes"
                        " that."
                    ),
                    remediation="Use QK-norm (--qk-norm), or a lower learning rate.",
                    limits={"limit": 0.01, "reports": 2},
                    rule=past_checks.beyond("entropy", below=True),
                    description="mean entropy of a head's rows over the largest possible",
                )
            },
            live=True,
            title="attention's entropy",
            unit="share of that of equal weights",
        ),
        "held_loss": Measure(
            formula="the loss at the held batch, in evaluation mode",
            measured_by="a probe",
            checks={
                "held loss rises": Check(
                    severity="note",
                    source=f"{OURS}: the batch is the same, so that no chance moves its loss",
                    impact="The model learns what only its training batches have.",
                    remediation=(
                        "Stop at the least held loss, or train on more data, or with more weight"
                        " decay or dropout."
                    ),
                    limits={"limit": 0.1, "probes": 2},
                    rule=past_checks.held_loss_rises,
                    description=(
                        "nats above its least value in the last probes, while the training's loss"
                        " falls"
                    ),
                )
            },
            unit="nats",
        ),
        "preconditioned_over_edge": Measure(
            formula=(
                "the sharpness by the optimiser's own steps over its edge: 2 (1 + b)/((1 - b) lr)"
                " for Adam"
            ),
            measured_by="a probe",
            checks={
                "beyond the edge of stability": Check(
                    severity="serious",
                    source="Cohen et al. 2022 (arXiv 2207.14484): trainings stay near 1",
                    impact="Steps along the sharpest direction grow.",
                    remediation="Use a longer warm-up, or a lower learning rate.",
                    limits={"limit": 1.5},
                    rule=past_checks.probed("preconditioned_over_edge"),
                )
            },
        ),
    },
    topic="training",
)
MEASURES.limit(
    "training",
    {
        "costate": {
            "gradients explode by depth": Check(
                severity="serious",
                source=(
                    "the screening's limit on the condition of the backward pass (Kan's step 3)"
                ),
                impact="Early blocks change fast while late ones learn.",
                remediation=(
                    "Use a warm-up, a norm inside the residual branch (placement pre or peri),"
                    " smaller initial weights, or a smaller dt."
                ),
                limits={"limit": 100.0, "reports": 1},
                rule=partial(past_checks.by_depth, exploding=True),
                description=(_CONDITION),
            ),
            "gradients vanish by depth": Check(
                severity="serious",
                source=f"the screening's condition, whose limit is 0.1; this one: {SET}",
                impact="Early blocks keep their initial weights.",
                remediation=(
                    "Use a norm inside the residual branch (placement pre or peri), a warm-up,"
                    " or fewer blocks."
                ),
                limits={"limit": 3e-4, "reports": 2},
                rule=partial(past_checks.by_depth, exploding=False),
                description=(_CONDITION),
            ),
        },
        "rms": {
            "not finite": Check(
                severity="broken",
                source=f"no figure may be inf or nan{record_of(2, 2)}",
                impact="A step with it makes every weight nan.",
                remediation=(
                    "Go on from the last checkpoint, and skip the batches since then. If it comes"
                    " again: a wider dtype, a smaller loss scale or a lower learning rate."
                ),
                rule=past_checks.not_finite,
                description="a figure that is inf or nan",
            ),
            "embedding grows": Check(
                severity="serious",
                source=SET,
                impact=(
                    "What sublayers add becomes negligible, and every step of the ODE becomes"
                    " small."
                ),
                remediation=(
                    "Use a lower learning rate for the embedding, a longer warm-up, weight decay on"
                    " it, or a norm behind it."
                ),
                limits={"low": 25.0, "limit": 100.0, **_GROWTH},
                rule=past_checks.grows(
                    "rms", lambda values, past: past_checks.over_first(values, past, "rms")[:, :1]
                ),
                description="rms of X_0 over that of the first report",
            ),
            "hidden states grow too large": Check(
                severity="serious",
                source=(
                    "Kan et al. (arXiv 2510.09904): states grow in proportion to weights, or not"
                    f" at all; limits: {SET}{record_of(1, 1)}"
                ),
                impact="States overflow in half precision, and late blocks have no effect.",
                remediation=(
                    "Give the last maps of attention and FFN their size of before, and scale them"
                    " back after each step at which they are larger. In a new training: a norm"
                    " behind each sublayer (placement peri)."
                ),
                limits={"low": 400.0, "limit": 3000.0, **_GROWTH, "ahead": 1.0},
                rule=past_checks.grows(
                    "rms", lambda values, past: past_checks.over_first(values, past, "rms")
                ),
                description="rms of a state over that of the first report",
            ),
        },
        "largest": {
            "near the end of float16": Check(
                severity="serious",
                source="float16 ends at 65504",
                impact="The state will overflow to inf.",
                remediation=(
                    "Use bfloat16, a norm behind each sublayer (placement peri), or weight decay."
                ),
                limits={"low": 128.0, "limit": 32768.0, **_GROWTH},
                rule=past_checks.half_range,
                description="largest |x| of a state in float16",
            )
        },
        "velocity": {
            "dead layer": Check(
                severity="note",
                source=OURS,
                impact="The layer adds nothing, or learns nothing.",
                remediation=(
                    "Look for a path cut by detach(), and remove it. Set gains near 0 back to 1."
                    " Draw units that are always off again, with output weights of 0."
                ),
                limits={"limit": 1e-4, "same": 1e-3, "reports": 2},
                rule=past_checks.dead,
                description=(
                    "a sublayer's velocity or gradient over the median sublayer's, or the share of"
                    " its velocity that differs by token"
                ),
            ),
            "sublayer outgrows its past": Check(
                severity="note",
                source=(
                    f"{OURS}: at most 3.9 in 8 healthy trainings of the open half of"
                    " benchmarks/clinic, at least 28 after weights times 50 with no norm behind"
                ),
                impact=(
                    "One sublayer outweighs the others, as after a weight was changed from outside."
                ),
                remediation=(
                    "Compare the weights with those of the last checkpoint (`ctrans diagnose OLD"
                    " NEW`), and restore what nobody meant to change."
                ),
                limits={"limit": 10.0, "reports": 2, "least": 12},
                rule=past_checks.outgrown,
                description=(
                    "a sublayer's velocity over the median of its reports before, over that of the"
                    " median sublayer"
                ),
            ),
        },
    },
)


GAUGES = Chosen(lambda measure: measure.live)
"""What a report of a training has, by name: the measures that its hooks take."""


def measures_of(scope: Scope) -> dict[str, Callable[[Any], Tensor | float]]:
    """The functions of the measures of that scope, by name, where there is one."""
    return {
        name: measure.compute
        for name, measure in GAUGES.items()
        if measure.scope == scope and callable(measure.compute)
    }
