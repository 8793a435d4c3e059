"""What a monitor reads of a loop, without access to its code: the targets from the gradient at the
logits, the batches from the ids, and the optimiser's groups and steps.
"""

from __future__ import annotations

from ctrans.measure.findings import OURS, Check
from ctrans.measure.measures import MEASURES, Measure
from ctrans.training.monitor import loop_checks, past_checks

_LEFT_OUT = "not in the optimizer given to step, and no reported step moves them"
_KEEP = "These matrices keep their initial weights."
_GROUP_ALL = (
    "Make the optimizer of model.parameters(), behind everything that adds or replaces weights. To"
    " freeze them on purpose, set requires_grad_(False)."
)
_OF_GRADIENT = "see ctrans.training.monitor.target_gradient"
_TARGETS = {
    "target_weight": Measure(
        formula=(
            "dL/dCE summed over the targets of a step, read from the logits' gradient; L is minus"
            " the loss for an optimizer with maximize=True"
        ),
        source=_OF_GRADIENT,
        checks={
            "accumulation is not divided": Check(
                severity="note",
                source=f"{OURS}; the mean over the targets of a step has the weight 1",
                impact=(
                    "The gradient is that of the mean loss times the number of backward passes."
                    " Clipping and SGD then take other steps than you chose. Adam hardly differs."
                ),
                remediation="Divide the loss by the number of backward passes of a step.",
                limits={"limit": 1.5, "reports": 2},
                rule=loop_checks.not_divided,
                description="sum of dL/dCE over the targets of a step",
            ),
        },
        live=True,
    ),
    "raised_targets": Measure(
        formula="1 if all targets of a step have the same dL/dCE of target_weight, below 0; else 0",
        source=_OF_GRADIENT,
        checks={
            "loss is raised": Check(
                severity="serious",
                source="a mean loss that is lowered has one weight above 0",
                impact="Each step makes the targets less likely.",
                remediation=(
                    "Look for a minus sign before the loss, and for maximize=True of the optimizer."
                    " Do nothing if the model is meant to forget these targets."
                ),
                limits={"reports": 2},
                rule=loop_checks.raised,
                condition="1 in each of two reports",
            ),
        },
        live=True,
    ),
    "backward_passes": Measure(
        formula="number of backward passes of a step through the logits", live=True
    ),
    "target_unevenness": Measure(
        formula="largest mean dL/dCE of a target over the smallest, between passes of a step",
        source=_OF_GRADIENT,
        checks={
            "targets count unequally": Check(
                severity="note",
                source=f"{OURS}; the mean over all targets of a step gives 1",
                impact=(
                    "A target of a short micro-batch counts more than one of a long one, so the"
                    " training minimises another loss than the mean over targets."
                ),
                remediation=(
                    "Sum the losses of a step's micro-batches, and divide by the number of their"
                    " targets together (num_items_in_batch of transformers)."
                ),
                limits={"limit": 1.2, "reports": 2},
                rule=past_checks.beyond("target_unevenness"),
                description="largest over smallest weight of a target, between passes of a step",
            )
        },
        live=True,
    ),
    "over_guessing": Measure(
        formula="mean CE of sampled targets of the first micro-batch, less log V, in nats",
        source=_OF_GRADIENT,
        checks={
            "no better than guessing": Check(
                severity="serious",
                source=f"{OURS}; guessing has log V",
                impact="So far nothing is learned.",
                remediation=(
                    "See that weights move (learning rate, warm-up, the optimizer's groups), that"
                    " the loss has the right sign and gets logits, and that targets belong to their"
                    " inputs. Then train on one small batch alone: its loss must reach 0."
                ),
                limits={"steps": 200, "margin": 0.1, "deviations": 3.0, "reports": 3},
                rule=loop_checks.guessing,
                description="mean CE of the targets, less log V",
            )
        },
        live=True,
    ),
    "exchanged_targets": Measure(
        formula="the loss less that of the same targets in another order, in standard deviations",
        source="Hoeffding 1951: the mean and variance over all permutations",
        checks={
            "targets unrelated to inputs": Check(
                severity="note",
                source=f"{OURS}: three standard deviations of the test's own null",
                impact=(
                    "So far the model knows how often each target comes, and nothing of which input"
                    " has which target. A model of hidden tokens may stay there for long."
                ),
                remediation=(
                    "Compare a few inputs with their targets behind the loader: shuffled labels, an"
                    " index of another epoch, a sort of only one of both. See that the inputs reach"
                    " the logits (detach(), a mask of all tokens)."
                ),
                limits={"steps": 200, "deviations": 3.0, "margin": 0.1, "reports": 4},
                rule=loop_checks.unrelated,
                description="the loss less that of exchanged targets, in standard deviations",
            )
        },
        live=True,
    ),
    "target_ahead": Measure(
        formula="tokens from an input to its target, where all but 1% have the same distance",
        source=_OF_GRADIENT,
        checks={
            "targets are not the next tokens": Check(
                severity="serious",
                source="exact: at least 99% of the targets lie at this distance",
                impact=(
                    "At 0 the model has its own input to predict, and copies it. At 2 it skips a"
                    " token: the targets were shifted twice."
                ),
                remediation=(
                    "Shift the targets once. Models of transformers shift labels themselves, so"
                    " give them labels=input_ids. Do nothing if this distance is meant."
                ),
                limits={"reports": 2},
                rule=loop_checks.shifted,
                condition="other than 1",
                description="distance from a token to its target",
            )
        },
        live=True,
    ),
    "label_smoothing": Measure(
        formula="share s of the targets' weight that all classes have alike",
        source=_OF_GRADIENT,
        checks={
            "targets are smoothed away": Check(
                severity="note",
                source=OURS,
                impact="Most of each step pulls the model to guess, and not to its target.",
                remediation="Use a label_smoothing of 0, or of 0.1 as is usual.",
                limits={"limit": 0.5, "reports": 2},
                rule=past_checks.beyond("label_smoothing"),
                description="label smoothing, as the gradient shows it",
            )
        },
        live=True,
    ),
    "padding_counted": Measure(
        formula="share of counted targets in 8 or more equal tokens at the end of a sequence,"
        " of a token that had no such run with text behind it",
        source=_OF_GRADIENT,
        checks={
            "padding is predicted": Check(
                severity="note",
                source=OURS,
                impact="Part of each step teaches the model to go on with padding.",
                remediation="Set the targets of padding to -100 (the loss's ignore_index).",
                limits={"limit": 0.1, "reports": 3},
                rule=past_checks.beyond("padding_counted"),
                description="share of targets that are padding",
            )
        },
        live=True,
    ),
}
_BATCHES = {
    "same_batch": Measure(
        formula="1 if a step's batch equals that of the step before, else 0",
        checks={
            "same batch again": Check(
                severity="note",
                source="the same sum, to the bit, over up to 4096 entries of each batch",
                impact="The training sees one batch, and learns it by heart.",
                remediation=(
                    "Look for a batch that is drawn before the loop, a loader that is made in it,"
                    " or a seed that is set in it. Do nothing if you mean to fit one batch."
                ),
                limits={"limit": 0.5, "reports": 3},
                rule=past_checks.beyond("same_batch"),
                condition="1 in each of three reports",
            )
        },
        live=True,
    ),
    "commonest_token": Measure(
        formula="share of a batch's tokens that are its commonest one",
        checks={
            "one token fills the batch": Check(
                severity="serious",
                source=OURS,
                impact="There is hardly anything to learn from such a batch.",
                remediation=(
                    "Look at a batch behind the loader: is it padding, a tokenizer that knows none"
                    " of the words, or a buffer that was never filled?"
                ),
                limits={"limit": 0.9, "reports": 2},
                rule=past_checks.beyond("commonest_token"),
            )
        },
        live=True,
    ),
    "unlike_before": Measure(
        formula="divergence in nats of a batch's tokens, in 256 bins, from those of reports before",
        checks={
            "tokens unlike those before": Check(
                severity="serious",
                source=f"{OURS}: eight deviations of the run's own batches",
                impact="The ids no longer mean what they meant, or the text is another one.",
                remediation=(
                    "Compare the tokenizer and the files of now with those of before. Do nothing if"
                    " the data were meant to change here."
                ),
                limits={"deviations": 8.0, "nats": 0.2, "least": 8, "early": 4, "reports": 2},
                rule=loop_checks.unlike,
                description="divergence of a batch's tokens from those before, in nats",
            )
        },
        live=True,
    ),
}
_OPTIMIZER = {
    "ungrouped": Measure(
        formula="share of a sublayer's trainable matrices in no group of the optimizer, unmoved",
        scope="sublayer",
        checks={
            "weights in no group": Check(
                severity="serious",
                source=_LEFT_OUT,
                impact=_KEEP,
                remediation=_GROUP_ALL,
                limits={"limit": 0.0, "reports": 2},
                rule=loop_checks.ungrouped,
                description="share of a sublayer's matrices that are in no group",
            )
        },
        live=True,
    ),
    "ungrouped_outside": Measure(
        formula="the same for the weights outside of the depth",
        checks={
            "embedding or head in no group": Check(
                severity="note",
                source=_LEFT_OUT,
                impact=_KEEP,
                remediation=_GROUP_ALL,
                limits={"limit": 0.0, "reports": 2},
                rule=past_checks.beyond("ungrouped_outside"),
                description="share of the matrices outside of the depth that are in no group",
            )
        },
        live=True,
    ),
    "lost_entries": Measure(
        formula="share of sampled entries below float32 that one step does not change",
        scope="sublayer",
        checks={
            "steps are lost to rounding": Check(
                severity="serious",
                source=OURS,
                impact=(
                    "A step smaller than half the distance of two numbers changes nothing, so these"
                    " entries stay where they are, however many steps there are."
                ),
                remediation=(
                    "Keep the weights in float32 (autocast for speed), or round by chance"
                    " (stochastic rounding), or use a larger learning rate. Do nothing if the"
                    " optimizer carries the rest of each step on (Kahan's sum)."
                ),
                limits={"limit": 0.5, "reports": 2},
                rule=loop_checks.median_beyond("lost_entries"),
                description="share of entries that a step does not change, for the median sublayer",
            )
        },
        live=True,
    ),
    "weight_decay": Measure(
        formula=(
            "largest eta lambda of matrices, over 1 - momentum for SGD: the share that weight decay"
            " takes in a step"
        ),
        checks={
            "weights are forgotten": Check(
                severity="note",
                source="exact: weights are a mean of their steps over the last 1/share",
                impact="Of what was learned a hundred steps before, 1/e or less is left.",
                remediation=(
                    "Lower weight_decay: with AdamW 0.1 is usual, and 1/(learning rate * decay)"
                    " should be many steps."
                ),
                limits={"limit": 0.01, "reports": 2},
                rule=past_checks.beyond("weight_decay"),
                description="share of a weight that decay takes in a step",
            )
        },
        live=True,
    ),
    "gain_decay": Measure(
        formula="the share that weight decay takes of a norm's gains in a step, as weight_decay",
        live=True,
    ),
    "gain_size": Measure(
        formula="median |gain| of the norms",
        checks={
            "gains decay": Check(
                severity="note",
                source=OURS,
                impact=(
                    "Weight decay takes half of the gains in these steps, whatever the loss asks"
                    " for, and they shrink. Norms then pass on less and less."
                ),
                remediation=(
                    "Give gains and biases a group of their own with weight_decay=0 in the"
                    " optimizer."
                ),
                limits={"size": 0.5, "decay": 0.5, "share": 0.7},
                rule=loop_checks.decayed,
                description="median |gain| over that of the first of these reports",
            )
        },
        live=True,
    ),
    "optimizer_steps": Measure(
        formula="steps that the optimizer's state has counted, over those of the run",
        checks={
            "optimizer forgot its past": Check(
                severity="note",
                source="exact: a state that is saved with the weights has counted all steps",
                impact=(
                    "Adam starts again with moments of 0, so its first steps are as long as those"
                    " of a new training."
                ),
                remediation=(
                    "Load optimizer.state_dict() with the weights. If it is lost, warm up again. Do"
                    " nothing if a new stage is meant to begin."
                ),
                limits={"share": 0.5, "known": 0.9, "steps": 20},
                rule=loop_checks.forgotten,
            )
        },
        live=True,
    ),
}
LOOP = tuple(_TARGETS | _BATCHES | _OPTIMIZER)
"""The names of these measures. A figure of them that is nan is unknown."""
MEASURES.add("the monitor", _TARGETS | _BATCHES | _OPTIMIZER, topic="training")
