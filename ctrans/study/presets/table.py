"""The experiments of the papers. A new preset is one entry: the claim, its source, its effects, and
the study in the sizes `small` and `paper`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctrans.study.description import Study
from ctrans.study.presets.claim import Contrast
from solvers import ConfigError

SMALL = {
    "depth": 4,
    "width": 32,
    "heads": 2,
    "embedding_std": 0.1,
    "iterations": 1800,
    "warmup": 120,
    "batch": 16,
    "eval_every": 300,
    "eval_windows": 512,
    "weight_decay": 0.1,
    "learning_rate": 3e-3,
}
"""The usual base of `small`, for `TASK`: its best cases end below half of the depthless floor. A
run took 12 s on one processor.
"""
TASK = "recall"
"""The usual task of `small`. On a text this small, a model without depth is as good as one with it.
"""
GPT2 = {
    "vocab_size": 50304,
    "context": 1024,
    "depth": 12,
    "width": 768,
    "heads": 12,
    "dtype": "bfloat16",
    "iterations": 20_000,
    "batch": 12,
    "accumulate": 40,
    "warmup": 700,
    "eval_every": 1000,
    "learning_rate": 6e-4,
}
"""Kan's base: GPT-2 of 124M parameters on OpenWebText (nanoGPT's files, with --bin), 20,000
iterations.
"""
XL = {**GPT2, "depth": 48, "width": 1600, "heads": 25}
KIM = {
    **GPT2,
    "depth": 24,
    "width": 1024,
    "heads": 16,
    "context": 2048,
    "norm": "rmsnorm",
    "iterations": 30_000,
}
"""Kim's 400M models: 30 billion tokens."""
DIGITS = {
    "depth": 6,
    "width": 32,
    "heads": 4,
    "weight_decay": 0.1,
    "learning_rate": 3e-3,
    "iterations": 300,
    "batch": 8,
    "warmup": 30,
    "eval_every": 100,
    "eval_windows": 120,
}
"""The base of `small` for digits. A task fixes vocabulary and context."""
RATES = (1e-3, 3e-3, 1e-2)
"""The rates of cases that have their own best one. It is chosen on the other seeds."""
SIZES = ("small", "paper")
SEEDS = (0, 1, 2, 3, 4)
PRE, PERI, POST, NONE, OUTPUT, PRE_POST = (
    {"placement": name} for name in ("pre", "peri", "post", "none", "output", "pre_post")
)

PRE_LONG, PRE_SHORT, PERI_LONG, PERI_SHORT = (
    {**name, "dt": dt} for name in (PRE, PERI) for dt in (1.0, 0.1)
)
"""Runs with a long step and with a short one."""
LONG_AND_SHORT: dict[str, list[Any]] = {"placement": ["pre", "peri"], "dt": [1.0, 0.1]}
"""All four of them."""
COLD, WARM = {"warmup": 0}, {"warmup": 120}
"""Without and with a warm-up of the learning rate."""
FIXED, FALLS = (
    {"temperature_start": start, "temperature_steps": steps}
    for start, steps in ((None, 0), (10.0, 120))
)
"""Attention's temperature."""
VARIANCE_GROWS = Contrast("Pre-LN's variance grows more in training", PRE, PERI, "variance grown")
ENTRIES_GROW = Contrast(
    "Pre-LN's largest entry grows more beside the median one", PRE, PERI, "massive grown"
)


@dataclass(frozen=True)
class Preset:
    """An experiment of a paper.

    - `claim`, `source`: what the paper says, and where
    - `contrasts`: the effects, which are positive if the claim holds
    - `small`, `paper`: base configurations
    - `vary`, `cases`, `rates`, `seeds`, `measure`: as of a `Study`
    - `notes`: what a small model cannot show, and differences from the paper
    - `paper_vary`: fields that vary differently in `paper`
    - `tasks`: of `small` and `paper`, each of `ctrans.training.tasks.TASKS`, or "" for text
    """

    claim: str
    source: str
    contrasts: Sequence[Contrast]
    small: Mapping[str, Any]
    paper: Mapping[str, Any]
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    cases: Sequence[Mapping[str, Any]] = ()
    rates: Sequence[float] = ()
    seeds: Sequence[int] = SEEDS
    measure: Sequence[str] = ()
    notes: str = ""
    paper_vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tasks: tuple[str, str] = (TASK, "")

    def study(self, name: str, scale: str) -> Study:
        """The study at that scale. Raises ConfigError for an unknown one."""
        if scale not in SIZES:
            raise ConfigError(f"scale {scale!r}: choose {' or '.join(SIZES)}")
        if scale == "small":
            base, vary = (self.small, self.vary)
        else:
            base, vary = (self.paper, {**self.vary, **self.paper_vary})
        task = self.tasks[SIZES.index(scale)]
        source = {"task": task} if task else {"file": None, "bin": None}
        return Study(
            f"{name}-{scale}",
            base,
            vary,
            self.cases,
            self.rates,
            self.seeds,
            self.measure,
            source=source,
        )


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
        SMALL | {"learning_rate": 3e-2},
        GPT2,
        {"placement": ["none", "pre", "peri"], "weight_decay": [0.0, 0.1]},
        notes=(
            "at this size the learning rate is raised tenfold for anything to diverge; also a loss"
            " above the first counts as divergence"
        ),
    ),
    "kan-table-2": Preset(
        "at dt 1 Pre-LN ends at 5.43 and Peri-LN at 3.12, at dt 0.1 at 3.13 and 3.10 (124M)",
        "Kan et al., arXiv 2510.09904, table 2",
        [
            Contrast("Pre-LN ends lower at dt 0.1 than at 1", PRE_LONG, PRE_SHORT, over="best"),
            Contrast("at dt 1 Peri-LN ends lower than Pre-LN", PRE_LONG, PERI_LONG, over="best"),
            Contrast("Peri-LN ends lower at dt 0.1 than at 1", PERI_LONG, PERI_SHORT, over="best"),
        ],
        SMALL,
        GPT2,
        LONG_AND_SHORT,
        rates=RATES,
        notes="each case at its best rate; `paper` is the column of 124M",
    ),
    "kan-figure-1": Preset(
        "trained, Pre-LN's hidden states grow faster with depth than Peri-LN's, which grow at most"
        " linearly; dt 0.1 holds both",
        "Kan et al., arXiv 2510.09904, figure 1 and theorems 3 and 4",
        [
            Contrast(
                "Pre-LN's growth exponent is above Peri-LN's at dt 1",
                PRE_LONG,
                PERI_LONG,
                "growth exponent",
            ),
            Contrast(
                "Peri-LN's exponent is at most 1 (+ 0.1)",
                PERI,
                figure="growth exponent",
                beyond=1.1,
                sign=-1,
            ),
            Contrast(
                "Pre-LN's last state is larger at dt 1 than at 0.1", PRE_LONG, PRE_SHORT, "size"
            ),
            Contrast(
                "Peri-LN's last state is larger at dt 1 than at 0.1", PERI_LONG, PERI_SHORT, "size"
            ),
        ],
        SMALL | {"depth": 8},
        XL,
        LONG_AND_SHORT,
        measure=["moments"],
        notes=(
            "the paper says that a tuned weight decay keeps Pre-LN below exponential growth;"
            " exponents are of the second half"
        ),
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
        SMALL,
        KIM,
        {"placement": ["pre", "peri", "post"]},
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
        SMALL,
        KIM,
        {"placement": ["pre", "peri"]},
        measure=["moments", "massive"],
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
        SMALL,
        KIM,
        {"placement": ["peri", "pre_post", "post", "output"]},
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
        DIGITS,
        DIGITS
        | {
            "depth": 12,
            "width": 192,
            "heads": 3,
            "iterations": 5000,
            "warmup": 500,
            "eval_every": 500,
        },
        {"placement": ["pre", "peri"]},
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
            Contrast(
                "Post-LN ends lower with warm-up than without",
                POST | COLD,
                POST | WARM,
                over="best",
            ),
            Contrast(
                "Pre-LN gains at most 0.1 nats by warm-up",
                PRE | COLD,
                PRE | WARM,
                beyond=0.1,
                over="best",
                sign=-1,
            ),
            Contrast(
                "without warm-up Pre-LN ends lower than Post-LN",
                POST | COLD,
                PRE | COLD,
                over="best",
            ),
        ],
        SMALL | {"initialisation": "xavier", "activation": "relu"},
        GPT2
        | {
            "initialisation": "xavier",
            "activation": "relu",
            "depth": 6,
            "width": 512,
            "heads": 8,
            "context": 256,
        },
        {"placement": ["pre", "post"], "warmup": [0, 120]},
        rates=RATES,
        notes=(
            "the paper translates and fills gaps; here it is recall (`paper`: the next token, of a"
            " model of the paper's size)"
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
        SMALL,
        GPT2 | {"depth": 36, "width": 1280, "heads": 20},
        {"placement": ["pre", "deepnorm"]},
        measure=["attention"],
        notes=(
            "measured before and after the training, and not between; judged for Pre-LN, the other"
            " is for the eye"
        ),
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
        SMALL,
        GPT2,
        cases=[POST | COLD | FIXED, POST | COLD | FALLS, POST | WARM | FIXED],
        rates=RATES,
        notes=(
            "losses are means over the rates, as the claim is of stability; the temperature falls"
            " from 10 to 1 in 120 iterations"
        ),
    ),
    "depth": Preset(
        "with an output norm or a short step, models of over 100 blocks train where Pre-LN at dt 1"
        " does worse",
        "Kan et al., arXiv 2510.09904, sections 3.3 and 5",
        [
            Contrast(
                "at 128 blocks Peri-LN at dt 0.1 ends lower than Pre-LN at dt 1",
                PRE_LONG,
                PERI_SHORT,
            ),
            Contrast("at 128 blocks Pre-LN ends lower at dt 0.1 than at 1", PRE_LONG, PRE_SHORT),
        ],
        SMALL | {"depth": 128, "width": 16, "iterations": 600, "warmup": 60},
        GPT2 | {"depth": 128},
        LONG_AND_SHORT,
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
        SMALL,
        GPT2,
        {"placement": ["pre", "peri"], "weight_decay": [0.0, 0.1, 1.0], "batch": [8, 16]},
        rates=[1e-3, 3e-3, 1e-2, 3e-2],
        notes="a seed's best is the setting that is best on the other seeds",
        paper_vary={"batch": [12, 24]},
    ),
}
