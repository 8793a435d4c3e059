"""Random models, states and texts for testing statements, in float64."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.fields import ACTIVATIONS
from ctrans.dynamics.norm import Norm
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.theory.random_norms import PAPERS, learned

VOCABULARY = 11


def random_model(draw: Draw, placement: str, *, spread: float = 0.3, **changes: object) -> GPT:
    """A small frozen GPT with weights like those of a trained model: Xavier's plus noise, biases,
    learned gains and offsets.

    The defaults are width 8, two heads, two blocks and a random norm, activation and mask;
    `changes` replaces them. `spread` is the size of the noise; with 0 the weights are those of the
    initialisation.
    """
    activations_of_degree_1 = sorted(name for name, phi in ACTIVATIONS.items() if phi.degree == 1)
    settings = {
        "vocab_size": VOCABULARY,
        "context": 8,
        "depth": 2,
        "width": 8,
        "heads": 2,
        "ffn_width": 16,
        "placement": placement,
        "norm": draw.choice(PAPERS),
        "dt": draw.uniform(0.05, 1.5),
        "activation": draw.choice(activations_of_degree_1),
        "causal": draw.flag(),
        "initialisation": "xavier",
        "embedding_std": 1.0,
    }
    config = GPTConfig(**{**settings, **changes})  # type: ignore[arg-type]  # by name, and checked as it is made
    model = GPT(config, seed=draw.seed()).double().requires_grad_(requires_grad=False)
    if spread:
        _add_noise(draw, model, spread)
    return model


@torch.no_grad()
def _add_noise(draw: Draw, model: GPT, spread: float) -> None:
    for part in model.modules():
        if isinstance(part, Norm):
            learned(draw, part, spread)
            continue
        for parameter in part.parameters(recurse=False):
            noise = draw.normal(*parameter.shape)
            parameter.add_(spread * noise / math.sqrt(parameter.shape[-1]))


def smooth_model(draw: Draw, depth: int, dt: float = 1.0) -> GPT:
    """A `pre` model of width 16 with LayerNorm and GELU and initial weights."""
    return random_model(
        draw, "pre", spread=0, depth=depth, width=16, dt=dt, norm="layernorm", activation="gelu"
    )


def random_state(
    draw: Draw, model: GPT, batch: int = 1, tokens: int | None = None
) -> Float[Tensor, "batch tokens width"]:
    """A random hidden state for the model, with entries of size 1/10 to 10."""
    return draw.log_uniform(-1, 1) * draw.normal(
        batch, tokens or 1 + draw.integer(5), model.config.width
    )


def random_text(draw: Draw, batch: int = 2, length: int = 5) -> Int[Tensor, "batch tokens"]:
    """Random tokens of the models' vocabulary."""
    return torch.randint(VOCABULARY, (batch, length), generator=draw.generator)


def describe_model(model: GPT) -> str:
    """A short description of the model."""
    config = model.config
    return (
        f"{config.placement}, {config.norm}, {config.depth} blocks, width {config.width}, dt"
        f" {config.dt:.3g}"
    )


def random_block(draw: Draw, placement: str) -> tuple[GPT, Float[Tensor, "1 tokens width"]]:
    """A random block with noisy gains, offsets and biases, and a random state of up to 8 tokens."""
    heads = 1 + draw.integer(2)
    width = heads * (1 + draw.integer(4)) + (heads == 1)
    config = GPTConfig(
        vocab_size=2,
        context=8,
        depth=1,
        width=width,
        heads=heads,
        placement=placement,
        norm=draw.choice(PAPERS),
        dt=draw.uniform(0.05, 2.0),
        activation=draw.choice(["gelu", "relu", "silu", "tanh"]),
        causal=draw.flag(),
        temperature=draw.uniform(0.3, 3.0),
        initialisation="lecun",
    )
    model = GPT(config, seed=draw.seed()).double().requires_grad_(requires_grad=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(draw.uniform(0.0, 1.0) * draw.normal(*parameter.shape))
    return model, draw.log_uniform(-2.0, 1.0) * draw.normal(1, 1 + draw.integer(8), width)
