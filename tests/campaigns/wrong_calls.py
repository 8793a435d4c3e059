"""Calls of the public Python API that make no sense: each raises ConfigError or SolveError, or
gives numbers of the right shape.
"""

import math

import torch
from hypothesis import strategies as st

from ctrans.control import costate
from ctrans.dynamics.scheme import Scheme
from ctrans.interop import from_architecture, from_nanogpt, open_model
from ctrans.model.checkpoint import load
from ctrans.model.config import GPTConfig
from ctrans.model.generation import generate
from ctrans.model.gpt import GPT
from ctrans.training.settings import TrainConfig
from tests.campaigns.harness import draw_all
from tests.helpers import small_config, tokens
from tests.interop import plain_nanogpt

NUMBERS = [
    0,
    -1,
    1,
    2,
    1.5,
    10**40,
    -(10**40),
    math.nan,
    math.inf,
    -math.inf,
    1e39,
    1e-320,
    True,
    None,
]
NAMES = ["", "x", "n" * 300, "\udcff", "peri", "softmax", 3, None]
TOKENS = [
    tokens(),
    tokens() - 1,
    tokens() + 100,
    tokens().float(),
    tokens().bool(),
    tokens()[:, :0],
    tokens()[:0],
    torch.tensor(3),
    torch.zeros(2, 99, dtype=torch.int64),
    torch.full((2, 8), -1),
    torch.zeros(2, 7, dtype=torch.int64),
]
MODEL = GPT(small_config("peri"))
CONFIG = {
    **dict.fromkeys(
        (
            "vocab_size",
            "context",
            "depth",
            "width",
            "heads",
            "dt",
            "temperature",
            "eps",
            "alpha",
            "knots",
        ),
        NUMBERS,
    ),
    **dict.fromkeys(("norm_groups", "norm_alpha", "norm_radius"), NUMBERS),
    **dict.fromkeys(("ffn_width", "embedding_std", "bias", "causal", "qk_norm"), NUMBERS),
    **dict.fromkeys(
        (
            "rotary_base",
            "rotary_fraction",
            "kv_heads",
            "window",
            "softcap",
            "sinks",
            "gated_output",
        ),
        NUMBERS,
    ),
    **dict.fromkeys(
        (
            "placement",
            "norm",
            "attention",
            "ffn",
            "activation",
            "initialisation",
            "depth_weights",
            "positions",
        ),
        NAMES,
    ),
}
TRAINING = {
    **dict.fromkeys(
        (
            "batch",
            "accumulate",
            "iterations",
            "learning_rate",
            "min_learning_rate",
            "warmup",
            "weight_decay",
        ),
        NUMBERS,
    ),
    **dict.fromkeys(
        (
            "beta1",
            "beta2",
            "clip",
            "temperature_start",
            "temperature_steps",
            "kinetic",
            "steps",
            "rtol",
        ),
        NUMBERS,
    ),
    **dict.fromkeys(
        ("eval_every", "eval_windows", "save_every", "margin", "patience", "seed"), NUMBERS
    ),
    **dict.fromkeys(("optimiser", "method", "gradient", "dtype", "schedule"), NAMES),
}
ARGUMENTS = dict.fromkeys(
    ("n_head", "n_layer", "steps", "lmbda", "dropout", "cts", "lnf_on", "block_size", "other"),
    NUMBERS,
)


def forward(x, targets):
    logits, loss = MODEL(x, targets)
    assert logits.shape == (*x.shape, 11)
    assert targets is None or bool(loss.isfinite())


def nanogpt(**arguments):
    from_nanogpt({"model": plain_nanogpt.weights(), "model_args": {"n_head": 2, **arguments}})


def gpt2(**changes):
    from_architecture(
        {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, **changes}
    )


CALLS = {
    "GPTConfig": (lambda **given: GPTConfig(**given), CONFIG),
    "TrainConfig": (lambda **given: TrainConfig(**given), TRAINING),
    "Scheme": (
        lambda **given: Scheme(**given),
        {"method": NAMES, "steps": NUMBERS, "rtol": NUMBERS, "atol": NUMBERS, "gradient": NAMES},
    ),
    "GPT": (
        lambda x=TOKENS[0], targets=None: forward(x, targets),
        {"x": TOKENS, "targets": TOKENS},
    ),
    "at_depth": (
        lambda blocks=2, weights="linear": MODEL.at_depth(blocks, weights),
        {"blocks": [*NUMBERS[:2], 3, 10**40, None], "weights": NAMES},
    ),
    "generate": (
        lambda prompt=TOKENS[0], count=1, **given: generate(MODEL, prompt, count, **given),
        {
            "prompt": TOKENS,
            "count": [0, -1, 1, 1.5, 10**40, None],
            "temperature": NUMBERS,
            "top_k": NUMBERS,
            "seed": NUMBERS,
        },
    ),
    "trajectory": (
        lambda x=TOKENS[0], **given: MODEL.trajectory(x, **given),
        {
            "x": TOKENS,
            "method": NAMES,
            "steps": [0, -1, 1.5, True, None, "x"],
            "rtol": NUMBERS[6:9],
            "gradient": NAMES,
        },
    ),
    "costate": (
        lambda x=TOKENS[0], targets=TOKENS[0]: costate(MODEL, x, targets),
        {"x": TOKENS, "targets": TOKENS},
    ),
    "from_nanogpt": (nanogpt, ARGUMENTS),
    "from_architecture": (
        gpt2,
        {
            "n_layer": NUMBERS,
            "n_embd": NUMBERS,
            "n_head": NUMBERS,
            "vocab_size": NUMBERS,
            "model_type": NAMES,
        },
    ),
    "load": (
        lambda path="x": load(path),
        {"path": ["", "n" * 300, "\udcff", "\0", "/", "/dev/null", "/proc/self/mem"]},
    ),
    "open_model": (
        lambda path="x", **given: open_model(path, **given),
        {"path": ["", "n" * 300, "\udcff", "\0", "/"], "dt": NUMBERS},
    ),
}
"""What is called, and what is given to each of its arguments."""


@st.composite
def calls(draw):
    """A function and one to three of its arguments."""
    name = draw(st.sampled_from(list(CALLS)))
    pools = CALLS[name][1]
    chosen = draw(st.lists(st.sampled_from(sorted(pools)), min_size=1, max_size=3, unique=True))
    return name, {argument: draw(st.sampled_from(pools[argument])) for argument in chosen}


def campaign(count, seed, check):
    """So many calls: `check(name, arguments, error)` with what came of each, None where it was
    answered.
    """

    def make(call):
        name, arguments = call
        try:
            CALLS[name][0](**arguments)
        except Exception as error:  # whatever is no refusal is what a campaign looks for
            check(name, arguments, error)
        else:
            check(name, arguments, None)

    draw_all(count, seed, calls(), make)
