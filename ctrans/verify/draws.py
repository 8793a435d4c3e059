"""Random objects to check statements on, all from one generator: numbers, norms, models, states. Everything is float64."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.fields import ACTIVATIONS
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.norm import NORMS, Norm, SphereNorm

Item = TypeVar("Item")
AnyNorm = TypeVar("AnyNorm", bound=Norm)
VOCABULARY = 11
PAPERS = ("layernorm", "rmsnorm")
"""The norms that the papers' statements are about."""


def noise(generator: torch.Generator, *shape: int) -> Float[Tensor, "*shape"]:
    """Entries N(0, 1)."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def below(generator: torch.Generator, end: int) -> int:
    """A whole number from 0 to end - 1."""
    return int(torch.randint(end, (), generator=generator))


def between(generator: torch.Generator, low: float, high: float) -> float:
    """Uniform in [low, high]."""
    return low + (high - low) * float(torch.rand((), dtype=torch.float64, generator=generator))


def size(generator: torch.Generator, low: float, high: float) -> float:
    """10 to the power of a number uniform in [low, high]."""
    return 10 ** between(generator, low, high)


def one_of(generator: torch.Generator, items: Iterable[Item]) -> Item:
    """One of the items, equally likely; of a table, one of its names."""
    known = list(items)
    return known[below(generator, len(known))]


def norm(
    generator: torch.Generator, name: str | None = None, *, width: int | None = None, eps: float = 0.0, signed: bool = True
) -> SphereNorm:
    """A norm of the papers with gains as training leaves them: of any size from 1/4 to 4 and sign, offsets N(0, 1/4) where it has them."""
    chosen = NORMS[name or one_of(generator, PAPERS)](width or 2 + below(generator, 11), eps).double()
    assert isinstance(chosen, SphereNorm), "the papers' norms divide a token by its size"
    return learned(generator, chosen, 0.5, signed).requires_grad_(False)


@torch.no_grad()
def learned(generator: torch.Generator, chosen: AnyNorm, spread: float, signed: bool = True) -> AnyNorm:
    """The norm with gains +-e^(spread N(0, 1)), cut at e^(+-3 spread), and offsets spread N(0, 1)."""
    if chosen.gains == "one":
        for parameter in chosen.parameters():
            parameter.mul_((spread * noise(generator, 1).clamp(-3, 3)).exp())
        return chosen
    gains = (spread * noise(generator, chosen.width).clamp(-3, 3)).exp()
    signs = torch.where(torch.rand(chosen.width, generator=generator) < 0.25, -1.0, 1.0) if signed else 1.0
    chosen.gamma.copy_(gains * signs)
    chosen.beta.copy_(spread * noise(generator, chosen.width))  # where there are none these are fresh numbers
    return chosen


def model(generator: torch.Generator, placement: str, *, spread: float = 0.3, **changes: object) -> GPT:
    """A small GPT with weights as training leaves them: Xavier's plus noise, biases, learned gains and offsets, frozen.

    Width 8, two heads, two blocks, any norm, activation and mask, unless `changes` say otherwise; `spread` 0 is as initialised.
    """
    chosen = {
        "vocab_size": VOCABULARY,
        "context": 8,
        "depth": 2,
        "width": 8,
        "heads": 2,
        "ffn_width": 16,
        "placement": placement,
        "norm": one_of(generator, PAPERS),
        "dt": between(generator, 0.05, 1.5),
        "activation": one_of(generator, sorted(name for name, phi in ACTIVATIONS.items() if phi.degree == 1)),
        "causal": bool(below(generator, 2)),
        "initialisation": "xavier",
        "embedding_std": 1.0,
    }
    config = GPTConfig(**{**chosen, **changes})  # type: ignore[arg-type]  # by name, and checked as it is made
    made = GPT(config, seed=below(generator, 2**31)).double().requires_grad_(False)
    if spread:
        with torch.no_grad():
            for part in made.modules():
                if isinstance(part, Norm):
                    learned(generator, part, spread)
                else:
                    for parameter in part.parameters(recurse=False):
                        parameter.add_(spread * noise(generator, *parameter.shape) / math.sqrt(parameter.shape[-1]))
    return made


def state(
    generator: torch.Generator, made: GPT, batch: int = 1, tokens: int | None = None
) -> Float[Tensor, "batch tokens width"]:
    """A hidden state for the model, entries of size 1/10 to 10."""
    return size(generator, -1, 1) * noise(generator, batch, tokens or 1 + below(generator, 5), made.config.width)


def text(generator: torch.Generator, batch: int = 2, length: int = 5) -> Int[Tensor, "batch tokens"]:
    """Random tokens of the models' vocabulary."""
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


def described(made: GPT) -> str:
    """The model in a few words, for a case."""
    config = made.config
    return f"{config.placement}, {config.norm}, {config.depth} blocks, width {config.width}, dt {config.dt:.3g}"


def norm_words(chosen: SphereNorm) -> str:
    """The norm in a few words, for a case."""
    return f"{'LayerNorm' if chosen.centred else 'RMSNorm'}, d = {chosen.width}"
