"""Text from a model: one token at a time, each drawn from softmax(logits / temperature) of the k likeliest."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.depth import check_count
from ctrans.model.config import check_seed
from ctrans.model.gpt import GPT
from ctrans.scheme import DISCRETE, Scheme
from solvers import ConfigError, SolveError


def generate(
    model: GPT,
    prompt: Int[Tensor, "*batch tokens"],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    scheme: Scheme = DISCRETE,
) -> Int[Tensor, "*batch count"]:
    """The `count` tokens that follow the prompt: x_(i+1) ~ softmax(logits(x_1 .. x_i)/temperature) among the `top_k` likeliest.

    Temperature 0 takes the likeliest token, the first where several are. The model sees no more than its context of the latest
    tokens. Draws are made on the CPU: a seed gives the same text on every device whose logits agree. `scheme` is the
    discrete model unless given. Raises ConfigError for a request that cannot be, and SolveError where the logits are not finite
    or an integration fails.
    """
    tokens = stream(model, prompt, count, temperature=temperature, top_k=top_k, seed=seed, scheme=scheme)
    return torch.stack(list(tokens), dim=-1)


def stream(
    model: GPT,
    prompt: Int[Tensor, "*batch tokens"],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    scheme: Scheme = DISCRETE,
) -> Iterator[Int[Tensor, "*batch"]]:
    """The tokens of `generate`, each as it is made. A request that cannot be is refused at the call."""
    check_count("tokens", count)
    check_sampling(temperature, top_k, model.config.vocab_size)
    check_seed(seed)
    scheme.check(model.depth, model.token_embedding.weight.dtype)
    if not model.config.causal:
        raise ConfigError("this model's tokens see later ones (causal = False), so it cannot continue a text: use a causal one")
    if prompt.dim() == 0 or not prompt.shape[-1]:
        raise ConfigError("the prompt is empty: give at least one token to continue")
    with torch.no_grad():
        model.embed(prompt[..., -model.config.context :])  # refuses tokens that the model does not know
    return _stream(model, prompt, count, temperature, top_k, torch.Generator().manual_seed(seed), scheme)


def _stream(
    model: GPT,
    tokens: Tensor,
    count: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
    scheme: Scheme,
) -> Iterator[Tensor]:
    for made in range(count):
        tokens = tokens[..., -model.config.context :]
        with torch.no_grad():  # inside the loop: what receives the tokens runs in between
            logits = model.head(scheme.last_state(model.depth, model.embed(tokens))[..., -1:, :])[..., 0, :].cpu().double()
        if not bool(torch.isfinite(logits).all()):
            raise SolveError(
                f"the logits after {made} tokens are not finite: the weights have diverged; use an earlier checkpoint"
            )
        token = sample(logits, temperature, top_k, generator)
        yield token
        tokens = torch.cat([tokens, token.unsqueeze(-1).to(tokens)], dim=-1)


def sample(
    logits: Float[Tensor, "*batch vocab"], temperature: float, top_k: int | None, generator: torch.Generator
) -> Int[Tensor, "*batch"]:
    """A token drawn from softmax(logits / temperature) among the `top_k` likeliest; the likeliest itself at temperature 0."""
    if temperature == 0:
        return logits.argmax(-1)
    # the largest becomes 0 first: a small temperature then sends the others to -inf, never the largest to inf
    scaled = (logits - logits.amax(-1, keepdim=True)) / float(temperature)
    if top_k is not None:
        values, places = scaled.topk(top_k)
        scaled = torch.full_like(scaled, -math.inf).scatter(-1, places, values)
    probabilities = scaled.softmax(-1)
    return torch.multinomial(probabilities.reshape(-1, logits.shape[-1]), 1, generator=generator).view(logits.shape[:-1])


def check_sampling(temperature: float, top_k: int | None, vocabulary: int) -> None:
    """Raises ConfigError unless the temperature is at least 0 and finite, and `top_k` between 1 and the vocabulary."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature = {temperature!r}: give a finite number of at least 0; 0 takes the likeliest token")
    if top_k is not None and check_count("top_k", top_k) > vocabulary:
        raise ConfigError(f"top_k = {top_k} of a vocabulary of {vocabulary}: give at most {vocabulary}, or leave it out")
