"""The checks of weights alone (`ctrans diagnose --weights-only`), and of what changed between two
checkpoints.
"""

from __future__ import annotations

import math

from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.measure.findings import OURS, Check, Reading
from ctrans.measure.measures import MEASURES, Measure, checks_of

_BETWEEN = f"{OURS}, for two checkpoints of one training or fine-tuning"
_BACK = (
    "Go back to the earlier checkpoint, and train on with a lower learning rate or clipped"
    " gradients."
)

MEASURES.add(
    "weights",
    {
        "smallest gain over the median": Measure(
            formula="smallest |gamma_i| of a norm over its median |gamma_i|",
            scope="weight",
            checks={
                "dead gain": Check(
                    severity="serious",
                    source=CHECKS["dead gain of an output norm"].source,
                    impact=(
                        "The channel is the norm's offset for every text. Around the state or"
                        " behind a sublayer this loses the channel."
                    ),
                    remediation=(
                        "Set the gain to the norm's median and train on. Diagnose with a text to"
                        " see which norm it is: before a sublayer it is a note."
                    ),
                    requires="gains whose name contains norm or ln",
                    low=1e-3,
                )
            },
        ),
        "weights that a block lacks": Measure(
            formula=(
                "names that most blocks of a list have and this one lacks; 0 of another kind. Of a"
                " file, 1 if names or shapes are not those of its config.json, or the number of"
                " blocks after its last that config.json says. Of a shard, the number of the others"
            ),
            scope="weight",
            checks={
                "block lacks weights": Check(
                    severity="serious",
                    source=(
                        "exact, by names and shapes: the block has no weight that the others lack,"
                        " or the file is not what its config.json or its own name describes"
                    ),
                    impact=(
                        "What is not in the file keeps its initial value, and a library may say"
                        " nothing of it."
                    ),
                    remediation=(
                        "Save the checkpoint again and compare the names. Do nothing if the block"
                        " was made smaller on purpose."
                    ),
                    requires="three numbered blocks of three weights or more, or a config.json",
                    high=0.0,
                    near=None,
                )
            },
        ),
        "units of zeros": Measure(
            formula="rows and columns of a block's matrix that are 0",
            scope="weight",
            checks={
                "dead units": Check(
                    severity="serious",
                    source=(
                        "weights are drawn at random, and training alone seldom makes a whole row"
                        f" 0; the limit is {OURS}"
                    ),
                    impact=(
                        "A row of zeros gives a unit the same value for every text. A column of"
                        " zeros ignores its input."
                    ),
                    remediation=(
                        "Draw the units again and train on, or remove them. Do nothing if the model"
                        " was pruned on purpose."
                    ),
                    requires="matrices in numbered blocks",
                    high=0.0,
                    near=None,
                )
            },
        ),
        "spectral norm": Measure(
            formula="|W|_2 of a matrix with both sides of at least 16",
            scope="weight",
        ),
        "stable rank": Measure(
            formula="|W|_F^2/|W|_2^2 of a matrix with both sides of at least 16",
            scope="weight",
            checks={
                "rank near one": Check(
                    severity="note",
                    source=f"{OURS}: at 1.1 one direction has 90% of the squares",
                    impact=(
                        "The matrix reads or writes one direction only. Nearly all of its"
                        " parameters have no effect."
                    ),
                    remediation=(
                        "Compare with an earlier checkpoint. In a training: a lower learning rate,"
                        " or weight decay."
                    ),
                    requires="matrices",
                    low=1.1,
                )
            },
        ),
        "outlier channel": Measure(
            formula="length of the longest row or column of a matrix over the median length",
            scope="weight",
            checks={
                "outlier channel": Check(
                    severity="note",
                    source=OURS,
                    impact="One channel sets the scale of the product and of a quantised tensor.",
                    remediation=(
                        "Quantise that channel separately. In a training: weight decay, or a norm"
                        " behind the sublayer."
                    ),
                    requires="matrices",
                    high=100.0,
                )
            },
        ),
    },
    topic="weights",
)
WEIGHT_CHECKS = checks_of("weights")
"""The checks of `--weights-only` by name."""
OTHER_CHANGE = "change of another figure"
"""The measure of a change of all figures that no other one compares."""


def _ratio(before: Reading, after: Reading) -> float:
    if before.value == after.value:
        return 1.0
    if before.value:
        return after.value / before.value
    return math.inf


def _factor(before: Reading, after: Reading) -> float:
    """How many times larger or smaller; nan where there is no ratio."""
    low, high = sorted((before.value, after.value))
    if low == high:
        return 1.0
    if low < 0 or math.isnan(low + high):
        return math.nan
    if low:
        return high / low
    return math.inf


def _more(before: Reading, after: Reading) -> float:
    return after.value - before.value


def _drift(before: Reading, after: Reading) -> float:
    """The factor of an outlier; of one that moved to another channel, its size there."""
    moved = before.figure.split(" has ")[0] != after.figure.split(" has ")[0]
    if moved:
        return max(before.value, after.value)
    return _factor(before, after)


MEASURES.add(
    "ctrans diagnose A B",
    {
        "new entries that are not finite": Measure(
            compares=("entries that are not finite",),
            compute=_more,
            formula="more entries of a weight or state are inf or nan than before",
            scope="weight",
            checks={
                "not finite now": Check(
                    severity="broken",
                    source="no such entry is allowed",
                    impact=CHECKS["not finite"].impact,
                    remediation="Go back to the earlier checkpoint.",
                    high=0.0,
                    near=None,
                )
            },
        ),
        "rise of the loss": Measure(
            compares=("loss on this text",),
            compute=_more,
            formula="the loss now less the loss before",
            unit="nats",
            scope="weight",
            checks={
                "loss rose": Check(
                    severity="serious",
                    source=f"{OURS}; both on the same text",
                    impact="The later model predicts this text worse than the earlier one.",
                    remediation=(
                        "See first that the text, the tokenizer and the loss are the same. Then go"
                        " back to the earlier checkpoint, or look for the weights that changed."
                    ),
                    requires="a loss of both",
                    high=0.1,
                )
            },
        ),
        "new units of zeros": Measure(
            compares=("units of zeros",),
            compute=_more,
            formula="rows and columns of a block's matrix that are 0 now and were not before",
            scope="weight",
            checks={
                "units died": Check(
                    severity="serious",
                    source=OURS,
                    impact="These units no longer react to the text, or nothing reads them.",
                    remediation=_BACK,
                    requires="matrices in numbered blocks of both",
                    high=0.0,
                    near=None,
                )
            },
        ),
        "growth of the spectral norm": Measure(
            compares=("spectral norm",),
            compute=_ratio,
            formula="|W'|_2/|W|_2",
            scope="weight",
            checks={
                "spectral norm grew": Check(
                    severity="serious",
                    source=_BETWEEN,
                    impact="The map stretches states and gradients by so much more.",
                    remediation=_BACK,
                    requires="matrices of both",
                    high=5.0,
                )
            },
        ),
        "change of the stable rank": Measure(
            compares=("stable rank",),
            compute=_ratio,
            formula="the ratio of |W|_F^2/|W|_2^2, now over before",
            scope="weight",
            checks={
                "stable rank fell": Check(
                    severity="serious",
                    source=(
                        f"{_BETWEEN}. MSign (arXiv 2602.01734) saw it fall before trainings failed"
                    ),
                    impact="The matrix acts in ever fewer directions.",
                    remediation=_BACK,
                    requires="matrices of both",
                    low=0.25,
                )
            },
        ),
        "change of a gain": Measure(
            compares=("smallest gain over the median", "largest gain of a norm"),
            compute=_factor,
            formula="the factor of a norm's largest |gamma|, or of its smallest over its median",
            scope="weight",
            checks={
                "gains moved": Check(
                    severity="serious",
                    source=_BETWEEN,
                    impact="A channel is scaled otherwise than the maps around it expect.",
                    remediation="Keep weight decay off gains, or lower their learning rate.",
                    requires="gains of both",
                    high=10.0,
                )
            },
        ),
        "update over weight": Measure(
            formula="|W' - W|/|W| in the Frobenius norm",
            scope="weight",
            checks={
                "weight replaced": Check(
                    severity="note",
                    source=f"{OURS}: at 1 the update is as large as the weight",
                    impact="Little of the earlier weight is left.",
                    remediation=(
                        "Expected from the start to the end of a training. In a fine-tuning, lower"
                        " the learning rate."
                    ),
                    requires="the weights of both",
                    high=1.0,
                )
            },
        ),
        "drift of an outlier channel": Measure(
            compares=("outlier channel",),
            compute=_drift,
            formula=(
                "the factor of the longest row or column over the median one; if another one is the"
                " longest now, the larger of the two lengths"
            ),
            scope="weight",
            checks={
                "outlier channel moved": Check(
                    severity="note",
                    source=_BETWEEN,
                    impact=(
                        "Scales of a quantisation, and masks for outliers, that were set before do"
                        " not fit any more."
                    ),
                    remediation="Calibrate the quantisation again.",
                    requires="matrices of both",
                    high=3.0,
                )
            },
        ),
        OTHER_CHANGE: Measure(
            compute=_factor,
            formula="how many times larger or smaller any other figure became",
            scope="weight",
            checks={
                "figure moved": Check(
                    severity="note",
                    source=_BETWEEN,
                    impact="The model behaves otherwise at this place.",
                    remediation="Compare the two findings or figures by depth.",
                    requires="a figure at the same place of both",
                    high=10.0,
                    near=None,
                )
            },
        ),
    },
    topic="change",
)
CHANGE_CHECKS = checks_of("change")
"""The checks of a change by name."""
