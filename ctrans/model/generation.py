"""Text from a model, one token at a time, drawn from softmax(logits / temperature) of the k most
likely tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.base.option import LARGEST, Range
from ctrans.base.shapes import TokenIds
from ctrans.dynamics.depth import check_count
from ctrans.dynamics.scheme import DISCRETE, Scheme
from ctrans.model.config import check_seed
from ctrans.model.gpt import GPT
from solvers import ConfigError, SolveError

TEMPERATURES = Range(0, LARGEST, "a finite number of at least 0; 0 takes the most likely token")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn: from softmax(logits/temperature) among the `top_k` most likely tokens
    (all if None), with this seed.

    Temperature 0 takes the most likely token, and the first of equally likely ones. The draws are
    made on the CPU, so that a seed gives the same text on all devices with the same logits. Raises
    ConfigError for invalid numbers.
    """

    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        TEMPERATURES.check("temperature", self.temperature)
        if self.top_k is not None:
            check_count("top_k", self.top_k)
        check_seed(self.seed)

    def check(self, vocabulary: int) -> None:
        """Raises ConfigError unless `top_k` is at most the vocabulary."""
        if self.top_k is not None and self.top_k > vocabulary:
            raise ConfigError(
                f"top_k = {self.top_k} of a vocabulary of {vocabulary}: give at most {vocabulary},"
                " or leave it out"
            )


DEFAULT = Sampling()


def generate(
    model: GPT,
    prompt: TokenIds,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    scheme: Scheme = DISCRETE,
) -> Int[Tensor, "*batch count"]:
    """The `count` tokens that follow the prompt: x_(i+1) ~ softmax(logits(x_1 .. x_i)/temperature)
    among the `top_k` most likely tokens.

    - `temperature`, `top_k`, `seed`: see `Sampling`
    - `scheme`: how to integrate the depth; by default the discrete model

    The model sees at most its context of the latest tokens. Raises ConfigError for an invalid
    request, and SolveError if logits are not finite or an integration fails.
    """
    sampling = Sampling(temperature, top_k, seed)
    tokens = list(stream(model, prompt, count, sampling, scheme))
    return torch.stack(tokens, dim=-1)


def stream(
    model: GPT,
    prompt: TokenIds,
    count: int,
    sampling: Sampling = DEFAULT,
    scheme: Scheme = DISCRETE,
) -> Iterator[Int[Tensor, "*batch"]]:
    """The tokens of `generate`, one at a time. Raises ConfigError at the call for an invalid
    request.
    """
    check_count("tokens", count)
    sampling.check(model.config.vocab_size)
    scheme.check(model.depth, model.token_embedding.weight.dtype)
    if not model.config.causal:
        raise ConfigError(
            "this model is not causal (causal = False), so it cannot continue a text: use a causal"
            " model"
        )
    if prompt.dim() == 0 or not prompt.shape[-1]:
        raise ConfigError("the prompt is empty: give at least one token to continue")
    with torch.no_grad():
        model.embed(prompt[..., -model.config.context :])  # raises for unknown tokens
    return _stream(model, prompt, count, sampling, scheme)


def _stream(
    model: GPT, tokens: Tensor, count: int, sampling: Sampling, scheme: Scheme
) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(sampling.seed)
    for drawn in range(count):
        tokens = tokens[..., -model.config.context :]
        with torch.no_grad():  # inside the loop, as the caller's code runs between the tokens
            last_state = scheme.last_state(model.depth, model.embed(tokens))
            last_token = model.head(last_state[..., -1:, :])[..., 0, :]
            logits = last_token.cpu().double()
        if not torch.isfinite(logits).all():
            raise SolveError(
                f"the logits after {drawn} tokens are not finite: the weights have diverged; use an"
                " earlier checkpoint"
            )
        token = sample(logits, sampling, generator)
        yield token
        tokens = torch.cat([tokens, token.unsqueeze(-1).to(tokens)], dim=-1)


def sample(
    logits: Float[Tensor, "*batch vocab"], sampling: Sampling, generator: torch.Generator
) -> Int[Tensor, "*batch"]:
    """A token drawn from softmax(logits/temperature) among the `top_k` most likely ones; the most
    likely one at temperature 0.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    # subtract the largest first, so that a small temperature cannot make it infinite
    scaled = (logits - logits.amax(-1, keepdim=True)) / float(sampling.temperature)
    if sampling.top_k is not None:
        largest, indices = scaled.topk(sampling.top_k)
        scaled = torch.full_like(scaled, -math.inf).scatter(-1, indices, largest)
    rows = scaled.softmax(-1).reshape(-1, logits.shape[-1])
    return torch.multinomial(rows, 1, generator=generator).view(logits.shape[:-1])
