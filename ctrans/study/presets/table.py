"""The experiments of the papers. A new preset is one entry: the claim, its source, its effects, and
the study in the sizes `small` and `paper`.
"""

from __future__ import annotations

from typing import Any

from ctrans.study.presets.bases import DEEP, DIGITS, GPT2, KIM, SMALL, TEXT, XIONG, XL
from ctrans.study.presets.claim import Contrast
from ctrans.study.presets.preset import Preset

PRE = {"placement": "pre"}
PERI = {"placement": "peri"}
POST = {"placement": "post"}
NONE = {"placement": "none"}
OUTPUT = {"placement": "output"}
PRE_POST = {"placement": "pre_post"}

LONG = {"dt": 1.0}
SHORT = {"dt": 0.1}
"""A long step and a short one."""
LONG_AND_SHORT: dict[str, list[Any]] = {"placement": ["pre", "peri"], "dt": [1.0, 0.1]}
"""Pre-LN and Peri-LN with both steps."""
COLD = {"warmup": 0}
WARM = {"warmup": 300}
"""Without and with a warm-up of the learning rate."""
FIXED = {"temperature_start": None, "temperature_steps": 0}
FALLS = {"temperature_start": 10.0, "temperature_steps": 300}
"""Attention's temperature."""
USUAL = {"initialisation": "lecun"}
LARGE = {"initialisation": "large"}
"""Entries of variance 1/d and 10/d."""
USUAL_FOR_KIM = {"initialisation": "gpt2", "weight_decay": 0.1, "qk_norm": False}
PLAIN = USUAL_FOR_KIM
XAVIER = USUAL_FOR_KIM | {"initialisation": "xavier"}
NO_DECAY = USUAL_FOR_KIM | {"weight_decay": 0.0}
MUCH_DECAY = USUAL_FOR_KIM | {"weight_decay": 0.33}
NORMED = USUAL_FOR_KIM | {"qk_norm": "rms"}
"""One setting apart from the usual ones."""
NEW_SEEDS = (10, 11, 12, 13, 14)
"""Of presets whose setting was found by runs with other seeds."""
VARIANCE_GROWS = Contrast("Pre-LN's variance grows more in training", PRE, PERI, "variance grown")
ENTRIES_GROW = Contrast(
    "Pre-LN's largest entry grows more beside the median one", PRE, PERI, "massive grown"
)
SHORT_HOLDS_PRE = Contrast(
    "Pre-LN's last state is larger at dt 1 than at 0.1", PRE | LONG, PRE | SHORT, "size"
)
SHORT_HOLDS_PERI = Contrast(
    "Peri-LN's last state is larger at dt 1 than at 0.1", PERI | LONG, PERI | SHORT, "size"
)
PRE_IS_LARGER = Contrast(
    "at dt 1 Pre-LN's last state is larger than Peri-LN's", PRE | LONG, PERI | LONG, "size"
)
SHORT_HELPS_PRE = Contrast("Pre-LN ends lower at dt 0.1 than at 1", PRE | LONG, PRE | SHORT)
PERI_IS_LOWER = Contrast("at dt 1 Peri-LN ends lower than Pre-LN", PRE | LONG, PERI | LONG)
SHORT_HELPS_PERI = Contrast("Peri-LN ends lower at dt 0.1 than at 1", PERI | LONG, PERI | SHORT)


PRESETS: dict[str, Preset] = {
    "kan-table-1": Preset(
        "of five runs Pre-LN diverges in 1 with weight decay and in 3 without, Peri-LN in none, a"
        " model without norms in all",
        "Kan et al., arXiv 2510.09904, table 1",
        [
            Contrast("without norms it diverges more often than Pre-LN", NONE, PRE, "diverged"),
            Contrast(
                "without decay, Pre-LN diverges more often than Peri-LN",
                PRE | {"weight_decay": 0.0},
                PERI | {"weight_decay": 0.0},
                "diverged",
            ),
            Contrast(
                "Pre-LN diverges more often without decay than with it",
                PRE | {"weight_decay": 0.0},
                PRE | {"weight_decay": 0.1},
                "diverged",
            ),
        ],
        small=DEEP,
        paper=GPT2,
        vary={"placement": ["none", "pre", "peri"], "weight_decay": [0.0, 0.1]},
        rates=[1e-2, 3e-2, 1e-1],
        seeds=NEW_SEEDS,
        notes="shares of the runs over the rates; the paper has one rate, and 1 to 5 of 5 runs",
    ),
    "kan-table-2": Preset(
        "at dt 1 Pre-LN ends at 5.43 and Peri-LN at 3.12, at dt 0.1 at 3.13 and 3.10 (124M)",
        "Kan et al., arXiv 2510.09904, table 2",
        [
            SHORT_HELPS_PRE,
            PERI_IS_LOWER,
            SHORT_HELPS_PERI,
            Contrast("Peri-LN at dt 0.1 ends lower than Pre-LN at dt 1", PRE | LONG, PERI | SHORT),
        ],
        small=DEEP,
        paper=GPT2,
        vary=LONG_AND_SHORT,
        rates=[3e-3, 1e-2, 3e-2],
        seeds=NEW_SEEDS,
        notes="means over a decade of rates, as what fails is rare; `paper` is the column of 124M",
    ),
    "kan-figure-1": Preset(
        "trained, Pre-LN's hidden states grow faster with depth than Peri-LN's, which grow at most"
        " linearly; dt 0.1 holds both",
        "Kan et al., arXiv 2510.09904, figure 1 and theorems 3 and 4",
        [
            PRE_IS_LARGER,
            Contrast(
                "Peri-LN's exponent is at most 1 (+ 0.1)",
                PERI,
                figure="growth exponent",
                beyond=1.1,
                sign=-1,
            ),
            SHORT_HOLDS_PRE,
            SHORT_HOLDS_PERI,
        ],
        small=DEEP | {"learning_rate": 1e-2},
        paper=XL,
        vary=LONG_AND_SHORT,
        seeds=NEW_SEEDS,
        measure=["moments"],
        notes=(
            "the paper says that a tuned weight decay keeps Pre-LN below exponential growth;"
            " exponents are of the second half"
        ),
    ),
    "text": Preset(
        "trained on a text, Pre-LN's hidden states grow more than Peri-LN's, with the depth and in"
        " training; dt 0.1 holds both, and Pre-LN ends lower with it; theta is near 1",
        "Kan et al., arXiv 2510.09904, figure 1 and table 2; Kim et al., arXiv 2502.02732, section"
        " 4.3; Emadi, section 7",
        [
            SHORT_HOLDS_PRE,
            SHORT_HOLDS_PERI,
            PRE_IS_LARGER,
            Contrast(
                "Peri-LN's exponent is at most 1 (+ 0.1)",
                PERI | LONG,
                figure="growth exponent",
                beyond=1.1,
                sign=-1,
            ),
            Contrast(
                "at dt 1 Pre-LN's variance grows more in training",
                PRE | LONG,
                PERI | LONG,
                "variance grown",
            ),
            Contrast(
                "at dt 1 Pre-LN's largest entry grows more beside the median one",
                PRE | LONG,
                PERI | LONG,
                "massive grown",
            ),
            SHORT_HELPS_PRE,
            PERI_IS_LOWER,
            SHORT_HELPS_PERI,
            Contrast(
                "mean theta of trained Pre-LN is above 0.9", PRE | LONG, figure="theta", beyond=0.9
            ),
        ],
        small=TEXT,
        paper=XL,
        vary=LONG_AND_SHORT,
        seeds=NEW_SEEDS[:3],
        measure=["moments", "massive", "attention"],
        notes="`small` reads the text that `make text` makes, from a clone's directory",
        tasks=("", ""),
        text="out/dictionaries",
    ),
    "kim-learning-rate": Preset(
        "over learning rates Peri-LN's best loss is below Pre-LN's and its loss depends on the rate"
        " less; Post-LN ends above both",
        "Kim et al., arXiv 2502.02732, section 4.1",
        [
            Contrast("Peri-LN's best loss is below Pre-LN's", PRE, PERI, over="best"),
            Contrast("Post-LN's best loss is above Pre-LN's", POST, PRE, over="best"),
            Contrast(
                "Pre-LN's loss depends on the rate more than Peri-LN's",
                PRE,
                PERI,
                over="sensitivity",
            ),
        ],
        small=SMALL,
        paper=KIM,
        vary={"placement": ["pre", "peri", "post"]},
        rates=[1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
    ),
    "kim-growth": Preset(
        "through training the variance of Pre-LN's last state and its massive activations grow far"
        " more than Peri-LN's",
        "Kim et al., arXiv 2502.02732, section 4.3; rebuttal",
        [
            VARIANCE_GROWS,
            ENTRIES_GROW,
        ],
        small=SMALL,
        paper=KIM,
        vary={"placement": ["pre", "peri"]},
        measure=["moments", "massive"],
    ),
    "kim-initial-variance": Preset(
        "with entries of initial variance 10/d Pre-LN ends at 4.53, Peri-LN at 3.03 (400M)",
        "Kim et al., arXiv 2502.02732, rebuttal: initial variances",
        [
            Contrast(
                "with variance 10/d Peri-LN ends lower than Pre-LN", PRE | LARGE, PERI | LARGE
            ),
            Contrast(
                "from 1/d to 10/d Pre-LN's loss rises by more than 0.1 nats",
                PRE | LARGE,
                PRE | USUAL,
                beyond=0.1,
            ),
            Contrast(
                "from 1/d to 10/d Peri-LN's loss rises by at most 0.1 nats",
                PERI | LARGE,
                PERI | USUAL,
                beyond=0.1,
                sign=-1,
            ),
        ],
        small=DEEP | {"norm": "rmsnorm"},
        paper=KIM,
        vary={"placement": ["pre", "peri"], "initialisation": ["lecun", "large"]},
        seeds=NEW_SEEDS,
        notes="d is each matrix's fan-in",
    ),
    "kim-variants": Preset(
        "Peri-LN ends below Pre-LN with Xavier's initial weights and at any weight decay, Pre-LN's"
        " variance stays the larger one, and a norm of queries and keys lowers Peri-LN's loss a"
        " little",
        "Kim et al., arXiv 2502.02732, rebuttal: Xavier, weight decay, QK-Norm",
        [
            Contrast(
                "with Xavier's weights Peri-LN ends lower than Pre-LN",
                PRE | XAVIER,
                PERI | XAVIER,
            ),
            Contrast(
                "with Xavier's weights Pre-LN's variance grows more",
                PRE | XAVIER,
                PERI | XAVIER,
                "variance grown",
            ),
            Contrast(
                "without weight decay Peri-LN ends lower than Pre-LN",
                PRE | NO_DECAY,
                PERI | NO_DECAY,
            ),
            Contrast(
                "at a weight decay of 0.33 Peri-LN ends lower than Pre-LN",
                PRE | MUCH_DECAY,
                PERI | MUCH_DECAY,
            ),
            Contrast(
                "with a norm of queries and keys Peri-LN ends lower than without",
                PERI | PLAIN,
                PERI | NORMED,
            ),
        ],
        small=SMALL,
        paper=KIM,
        vary={"placement": ["pre", "peri"]},
        cases=[PLAIN, XAVIER, NO_DECAY, MUCH_DECAY, NORMED],
        measure=["moments"],
        notes="the usual weight decay is 0.1",
    ),
    "kim-final-norm": Preset(
        "with the last norm on the sublayer's output (A + B, Peri-LN) models end lower than with it"
        " around the sum (A + C), these lower than Post-LN (C): 2.91, 3.01, 3.05; with the norm on"
        " the output alone (B) they diverge",
        "Kim et al., arXiv 2502.02732, rebuttal: norms at A, B and C of figure 2 (400M)",
        [
            Contrast("Peri-LN ends lower than A + C", PRE_POST, PERI, over="best"),
            Contrast("A + C ends lower than Post-LN", POST, PRE_POST, over="best"),
            Contrast(
                "with the output norm alone it diverges more often than Peri-LN",
                OUTPUT,
                PERI,
                "diverged",
            ),
        ],
        small=SMALL,
        paper=KIM,
        vary={"placement": ["peri", "pre_post", "post", "output"]},
        rates=[3e-3, 3e-2],
        notes=(
            "of the norm before the head the reviews and rebuttals claim nothing; best is of the"
            " rates, whose higher one is for anything to diverge"
        ),
    ),
    "vision": Preset(
        "what was seen of language carries over to images: in a vision Transformer, too, massive"
        " activations come with Pre-LN and less with Peri-LN, which learns no worse",
        "Kim et al., arXiv 2502.02732, rebuttal, question 2 (an expectation, by Sun et al., COLM"
        " 2024; no vision model was trained)",
        [
            ENTRIES_GROW,
            VARIANCE_GROWS,
            Contrast(
                "Peri-LN ends at most 0.05 nats above Pre-LN", PERI, PRE, beyond=0.05, sign=-1
            ),
        ],
        small=DIGITS,
        paper=DIGITS
        | {
            "depth": 12,
            "width": 192,
            "heads": 3,
            "iterations": 5000,
            "warmup": 500,
            "eval_every": 500,
        },
        vary={"placement": ["pre", "peri"]},
        measure=["moments", "massive"],
        notes=(
            "1,797 digits of 8 x 8 pixels, patches of one pixel; no size was published: `paper` is"
            " that of a tiny vision Transformer"
        ),
        tasks=("digits", "digits"),
    ),
    "xiong-warmup": Preset(
        "Post-LN needs a warm-up of the learning rate, Pre-LN trains as well without",
        "Xiong et al., ICML 2020, section 4.1 and figure 2",
        [
            Contrast("Post-LN ends lower with warm-up than without", POST | COLD, POST | WARM),
            Contrast(
                "Pre-LN gains at most 0.1 nats by warm-up",
                PRE | COLD,
                PRE | WARM,
                beyond=0.1,
                sign=-1,
            ),
            Contrast("without warm-up Pre-LN ends lower than Post-LN", POST | COLD, PRE | COLD),
        ],
        small=XIONG,
        paper=GPT2
        | {
            "initialisation": "xavier",
            "activation": "relu",
            "depth": 6,
            "width": 512,
            "heads": 8,
            "context": 256,
        },
        vary={"placement": ["pre", "post"], "warmup": [0, 300]},
        seeds=NEW_SEEDS,
        notes=(
            "at one rate, 0.003; the paper translates and fills gaps, here it is recall (`paper`:"
            " the next token, of a model of the paper's size)"
        ),
    ),
    "emadi-theta": Preset(
        "theta stays near 1 throughout training while the projections' norms, and S with them,"
        " drift",
        "Emadi, section 7 and figures 1 and 2",
        [
            Contrast("mean theta of a trained model is above 0.9", PRE, figure="theta", beyond=0.9),
            Contrast("log10 S drifts by more than 0.1", PRE, figure="S drift", beyond=0.1),
            Contrast(
                "log10 theta drifts by less than 0.05",
                PRE,
                figure="theta drift",
                beyond=0.05,
                sign=-1,
            ),
        ],
        small=SMALL,
        paper=GPT2 | {"depth": 36, "width": 1280, "heads": 20},
        vary={"placement": ["pre", "deepnorm"]},
        measure=["attention"],
        notes=(
            "measured before and after the training, and not between; judged for Pre-LN, the other"
            " is for the eye"
        ),
    ),
    "emadi-gradients": Preset(
        "in a trained Post-LN model of 36 blocks gradients are near 0 in the first 30 and large in"
        " the last, in Pre-LN they vary smoothly; Pre-LN ends lower (51.5 and 60.6)",
        "Emadi, section 7 and figure 1",
        [
            Contrast(
                "in Post-LN the first 30 blocks have less than a tenth of the last ones' gradient",
                POST,
                figure="early gradient",
                beyond=-1.0,
                sign=-1,
            ),
            Contrast(
                "in Pre-LN they have more than a tenth", PRE, figure="early gradient", beyond=-1.0
            ),
            Contrast("Pre-LN ends lower than Post-LN", POST, PRE),
        ],
        small=SMALL | {"depth": 36, "iterations": 1000, "learning_rate": 1e-3},
        paper=GPT2 | {"depth": 36, "width": 1280, "heads": 20, "learning_rate": 3e-4},
        vary={"placement": ["pre", "post"]},
        measure=["gradients"],
        notes="perplexities in the paper, losses here; at one rate, a third of the usual one",
    ),
    "emadi-temperature": Preset(
        "an attention temperature that falls from high to low stabilises a training as a warm-up of"
        " the learning rate does",
        "Emadi, section 6",
        [
            Contrast(
                "without warm-up Post-LN ends lower if its temperature falls",
                POST | COLD | FIXED,
                POST | COLD | FALLS,
            ),
            Contrast(
                "Post-LN's loss is at most 0.1 nats above that with a warm-up",
                POST | COLD | FALLS,
                POST | WARM | FIXED,
                beyond=0.1,
                sign=-1,
            ),
        ],
        small=XIONG,
        paper=GPT2,
        cases=[POST | COLD | FIXED, POST | COLD | FALLS, POST | WARM | FIXED],
        seeds=NEW_SEEDS,
        notes="at one rate, 0.003; the temperature falls from 10 to 1 in 300 iterations",
    ),
    "depth": Preset(
        "with an output norm or a short step, models of over 100 blocks train where Pre-LN at dt 1"
        " does worse",
        "Kan et al., arXiv 2510.09904, sections 3.3 and 5",
        [
            Contrast(
                "at 128 blocks Peri-LN at dt 0.1 ends lower than Pre-LN at dt 1",
                PRE | LONG,
                PERI | SHORT,
            ),
            Contrast(
                "at 128 blocks Pre-LN ends lower at dt 0.1 than at 1", PRE | LONG, PRE | SHORT
            ),
        ],
        small=SMALL | {"depth": 128, "width": 16, "iterations": 600, "warmup": 60},
        paper=GPT2 | {"depth": 128},
        vary=LONG_AND_SHORT,
    ),
    "tuning": Preset(
        "with a learning rate and a weight decay of its own Peri-LN gains over Pre-LN's settings"
        " (the papers' open question)",
        "Kan et al., arXiv 2510.09904, open question 3 of the digest",
        [
            Contrast(
                "Peri-LN's best over all settings is below its loss at Pre-LN's usual ones",
                PERI | {"learning_rate": 3e-3, "weight_decay": 0.1, "batch": 16},
                PERI,
                over="best",
            ),
            Contrast("each at its best, Peri-LN ends lower than Pre-LN", PRE, PERI, over="best"),
        ],
        small=SMALL,
        paper=GPT2,
        vary={"placement": ["pre", "peri"], "weight_decay": [0.0, 0.1, 1.0], "batch": [8, 16]},
        rates=[1e-3, 3e-3, 1e-2, 3e-2],
        notes="a seed's best is the setting that is best on the other seeds",
        paper_vary={"batch": [12, 24]},
    ),
}
