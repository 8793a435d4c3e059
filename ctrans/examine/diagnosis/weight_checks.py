"""The checks of weights alone (`ctrans diagnose --weights-only`), and of what changed between two
checkpoints.
"""

from __future__ import annotations

from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.measure.findings import OURS, Check, Checks

_BETWEEN = f"{OURS}, for two checkpoints of one training or fine-tuning"
_BACK = (
    "Go back to the earlier checkpoint, and train on with a lower learning rate or clipped"
    " gradients."
)

WEIGHT_CHECKS = Checks(
    "weights",
    {
        **{name: CHECKS[name] for name in ("not finite", "dead norm")},
        "dead gain": Check(
            "smallest gain over the median",
            "smallest |gamma_i| of a norm over its median |gamma_i|",
            "serious",
            CHECKS["dead gain of an output norm"].source,
            "The channel is the norm's offset for every text. Around the state or behind a sublayer"
            " this loses the channel.",
            "Set the gain to the norm's median and train on. Diagnose with a text to see which norm"
            " it is: before a sublayer it is a note.",
            requires="gains whose name contains norm or ln",
            low=1e-3,
        ),
        **{name: CHECKS[name] for name in ("zero weight", "gain too large")},
        "dead units": Check(
            "units of zeros",
            "rows and columns of a block's matrix that are 0",
            "serious",
            "weights are drawn at random, and training alone seldom makes a whole row 0; the limit"
            f" is {OURS}",
            "A row of zeros gives a unit the same value for every text. A column of zeros ignores"
            " its input.",
            "Draw the units again and train on, or remove them. Do nothing if the model was pruned"
            " on purpose.",
            requires="matrices in numbered blocks",
            high=0.0,
            near=None,
        ),
        "rank near one": Check(
            "stable rank",
            "|W|_F^2/|W|_2^2 of a matrix with both sides of at least 16",
            "note",
            f"{OURS}: at 1.1 one direction has 90% of the squares",
            "The matrix reads or writes one direction only. Nearly all of its parameters have no"
            " effect.",
            "Compare with an earlier checkpoint. In a training: a lower learning rate, or weight"
            " decay.",
            requires="matrices",
            low=1.1,
        ),
        "outlier channel": Check(
            "outlier channel",
            "length of the longest row or column of a matrix over the median length",
            "note",
            OURS,
            "One channel sets the scale of the product and of a quantised tensor.",
            "Quantise that channel separately. In a training: weight decay, or a norm behind the"
            " sublayer.",
            requires="matrices",
            high=100.0,
        ),
    },
)
"""The checks of `--weights-only` by name."""

CHANGE_CHECKS = Checks(
    "change",
    {
        "not finite now": Check(
            "new entries that are not finite",
            "more entries of a weight or state are inf or nan than before",
            "broken",
            "no such entry is allowed",
            CHECKS["not finite"].impact,
            "Go back to the earlier checkpoint.",
            high=0.0,
            near=None,
        ),
        "units died": Check(
            "new units of zeros",
            "rows and columns of a block's matrix that are 0 now and were not before",
            "serious",
            OURS,
            "These units no longer react to the text, or nothing reads them.",
            _BACK,
            requires="matrices in numbered blocks of both",
            high=0.0,
            near=None,
        ),
        "spectral norm grew": Check(
            "growth of the spectral norm",
            "|W'|_2/|W|_2",
            "serious",
            _BETWEEN,
            "The map stretches states and gradients by so much more.",
            _BACK,
            requires="matrices of both",
            high=5.0,
        ),
        "stable rank fell": Check(
            "change of the stable rank",
            "the ratio of |W|_F^2/|W|_2^2, now over before",
            "serious",
            f"{_BETWEEN}. MSign (arXiv 2602.01734) saw it fall before trainings failed",
            "The matrix acts in ever fewer directions.",
            _BACK,
            requires="matrices of both",
            low=0.25,
        ),
        "gains moved": Check(
            "change of a gain",
            "the factor of a norm's largest |gamma|, or of its smallest over its median",
            "serious",
            _BETWEEN,
            "A channel is scaled otherwise than the maps around it expect.",
            "Keep weight decay off gains, or lower their learning rate.",
            requires="gains of both",
            high=10.0,
        ),
        "weight replaced": Check(
            "update over weight",
            "|W' - W|/|W| in the Frobenius norm",
            "note",
            f"{OURS}: at 1 the update is as large as the weight",
            "Little of the earlier weight is left.",
            "Expected from the start to the end of a training. In a fine-tuning, lower the learning"
            " rate.",
            requires="the weights of both",
            high=1.0,
        ),
        "outlier channel moved": Check(
            "drift of an outlier channel",
            "the factor of the longest row or column over the median one; if another one is the"
            " longest now, the larger of the two lengths",
            "note",
            _BETWEEN,
            "Scales of a quantisation, and masks for outliers, that were set before do not fit any"
            " more.",
            "Calibrate the quantisation again.",
            requires="matrices of both",
            high=3.0,
        ),
        "figure moved": Check(
            "change of another figure",
            "how many times larger or smaller any other figure became",
            "note",
            _BETWEEN,
            "The model behaves otherwise at this place.",
            "Compare the two findings or figures by depth.",
            requires="a figure at the same place of both",
            high=10.0,
            near=None,
        ),
    },
)
"""The checks of a change by name."""
