"""`ctrans generate`."""

from __future__ import annotations

import codecs
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch

from ctrans.cli.click_options import once
from ctrans.cli.ending import check_json, result_of, write_json
from ctrans.cli.request import Request, command_of, get_device
from ctrans.model.checkpoint import find_model, load
from ctrans.model.generation import Sampling, stream
from ctrans.model.gpt import GPT
from ctrans.model.sums import STATE
from ctrans.model.text import VOCABULARY, read_text
from ctrans.option import COUNT, REQUIRED, option
from ctrans.report.progress import progress_bar
from ctrans.scheme import DISCRETE, Scheme
from ctrans.threads import choose_threads, flops
from ctrans.training.training_state import read_state
from solvers import ConfigError
from solvers.gradients import get_gradient
from solvers.methods import get_method

Decode = Callable[[int, bool], str]
Show = Callable[[str, int | None], None]
"""Takes a piece of text, and the token that it comes from if it was made."""
HARMLESS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")
"""Control characters but tab and newline: a model may write them, and a terminal would obey."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest(Request):
    """The request of `generate`; with `top_k` None it draws among all tokens."""

    checkpoint: Path = option(
        REQUIRED,
        "Directory of a saved model (config.json, model.safetensors), or of a training run: its best model, else its last.",
        multiple=True,
        callback=once,
    )
    prompt: str = option("", "Text to continue; token ids if the vocabulary is not bytes.", default_words="a new line")
    tokens: int = option(200, "Tokens to make. A token is a byte, unless the model has others.", limits=COUNT)
    samples: int = option(1, "Continuations, with seeds SEED, SEED + 1 and so on.", limits=COUNT)
    temperature: float = option(0.8, "Divide logits by this. 0 takes the likeliest token.")
    top_k: int | None = option(None, "Draw among this many likeliest tokens.", default_words="all")
    seed: int = option(0, "Seed of the draws.")
    device: str = option("cpu", "cpu, cuda, cuda:1.", group="Device")


@command_of(GenerateRequest, "generate")
def command(request: GenerateRequest) -> None:
    """Continue a text with a trained model, shown as it is made.

    A training run's model is integrated as it was trained; a model saved alone is the discrete one.
    A model of bytes prints its text in UTF-8, invalid bytes as �; a model of another vocabulary
    prints token ids.

    \b
    ctrans generate --checkpoint out/train --prompt "A class is"
    ctrans generate --checkpoint out/train/last --tokens 500 --temperature 0.5 --top-k 20 --samples 3
    """
    _check(request)
    device = get_device(request.device)
    place = find_model(request.checkpoint)
    model = load(place).to(device).requires_grad_(False).eval()
    if device.type == "cpu":
        choose_threads(flops(model.config.width, 1, model.config.context), next(model.parameters()).itemsize)
    prompt = encode(request.prompt, model.config.vocab_size)
    scheme = trained_with(place)
    if scheme != DISCRETE:
        click.echo(f"ctrans: integrated as it was trained, {words(scheme)}", err=True)
    count, samples = request.samples, []
    with progress_bar("generate", count * request.tokens) as advance:
        for k in range(count):
            show: Show = partial(_count, advance, k) if request.quiet else _write
            samples.append(_sample(model, prompt, request, k, show, scheme))
            show("\n" if k + 1 == count else "\n---\n", None)
    found = {"scheme": scheme, "prompt": prompt, "samples": samples}
    write_json(request, None, {**result_of(request, request.shown(), device), **found})


def trained_with(directory: Path) -> Scheme:
    """How the training run that made this checkpoint computes X_T; the discrete model where no run
    made it.

    Raises ConfigError for a training state that is damaged.
    """
    if not os.path.exists(directory / STATE):
        return DISCRETE
    config = read_state(directory).config
    method = get_method(config.method)
    own_scheme = get_gradient(config.gradient).scheme(method) is not method
    gradient = config.gradient if own_scheme else DISCRETE.gradient
    return Scheme(config.method, config.steps, config.rtol, config.atol, gradient)


def words(scheme: Scheme) -> str:
    """The options of `ctrans train` that stand for it."""
    fields = dataclasses.asdict(scheme).items()
    return " ".join(f"--{name} {value}" for name, value in fields if value != getattr(DISCRETE, name))


def encode(prompt: str, vocabulary: int) -> list[int]:
    """The prompt's bytes, or its token ids for a vocabulary that is not bytes. An empty text is a
    new line.
    """
    if vocabulary == VOCABULARY:
        return list(read_text(text=prompt or "\n"))
    try:
        ids = [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids or not all(0 <= i < vocabulary for i in ids):
        raise ConfigError(
            f"prompt {prompt!r}: this model's vocabulary of {vocabulary} is not bytes; give token ids from 0 to {vocabulary - 1}, "
            "as in --prompt '15 7 3'"
        )
    return ids


def decoder(vocabulary: int) -> Decode:
    """What a token adds to the text: a function of the token, and of whether it is the last."""
    if vocabulary == VOCABULARY:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token, last: utf8.decode(bytes([token]), last)
    return lambda token, last: f"{token}" if last else f"{token} "


def _check(request: GenerateRequest) -> None:
    """Says what can be said before a model is read."""
    for seed in (request.seed, request.seed + request.samples - 1):
        Sampling(request.temperature, request.top_k, seed)
    check_json(request)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One continuation, and the seconds that it took."""

    seed: int
    tokens: list[int]
    text: str
    seconds: float


def _sample(model: GPT, prompt: list[int], request: GenerateRequest, k: int, show: Show, scheme: Scheme) -> Sample:
    """The k-th continuation, shown as it is made."""
    started = time.perf_counter()
    decode = decoder(model.config.vocab_size)
    seed = request.seed + k
    made = stream(
        model,
        torch.tensor(prompt, device=model.token_embedding.weight.device),
        request.tokens,
        Sampling(request.temperature, request.top_k, seed),
        scheme,
    )
    show("".join(decode(token, False) for token in prompt), None)
    tokens: list[int] = []
    text = ""
    for i, token in enumerate(int(token) for token in made):
        piece = decode(token, i + 1 == request.tokens)
        show(piece, token)
        tokens.append(token)
        text += piece
    return Sample(seed, tokens, text, time.perf_counter() - started)


def _write(piece: str, token: int | None) -> None:
    encoding = sys.stdout.encoding
    click.echo(piece.translate(HARMLESS).encode(encoding, "replace").decode(encoding), nl=False)


def _count(advance: Callable[[str], None], k: int, piece: str, token: int | None) -> None:
    if token is not None:
        advance(f"sample {k + 1}")
