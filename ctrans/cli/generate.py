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
from typing import Any, Protocol, runtime_checkable

import torch

from ctrans.base.json_values import plain
from ctrans.base.option import COUNT, REQUIRED, option
from ctrans.base.threads import choose_threads, flops
from ctrans.cli.click_options import once
from ctrans.cli.ending import check_outputs, result_of, write_result
from ctrans.cli.request import Request, command_of
from ctrans.cli.say import say
from ctrans.dynamics.scheme import DISCRETE, Scheme
from ctrans.examine.generated import measured
from ctrans.model.checkpoint import find_model, load
from ctrans.model.generation import Sampling, stream
from ctrans.model.gpt import GPT
from ctrans.model.sums import STATE
from ctrans.model.text import VOCABULARY, read_text
from ctrans.report.contents import page_of_table
from ctrans.report.progress import progress_bar
from ctrans.training.processes import get_device
from ctrans.training.training_state import read_state
from solvers import ConfigError
from solvers.gradients import get_gradient
from solvers.methods import get_method


@runtime_checkable
class Decode(Protocol):
    """Gives the text of a token."""

    def __call__(self, token: int, *, last: bool) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest(Request):
    """The request of `generate`. If `top_k` is None it draws among all tokens."""

    checkpoint: Path = option(
        REQUIRED,
        "Directory of a saved model (config.json, model.safetensors), or of a training run: its"
        " best model, else its last.",
        multiple=True,
        callback=once,
    )
    prompt: str = option(
        "",
        "Text to continue; token ids if the vocabulary is not bytes.",
        default_words="a new line",
    )
    tokens: int = option(
        200,
        "Number of new tokens. A token is a byte unless the model has other tokens.",
        limits=COUNT,
    )
    samples: int = option(
        1, "Number of continuations, with seeds SEED, SEED + 1 and so on.", limits=COUNT
    )
    temperature: float = option(0.8, "Divide logits by this. 0 takes the most likely token.")
    top_k: int | None = option(
        None, "Draw among this many most likely tokens.", default_words="all"
    )
    seed: int = option(0, "Seed of the draws.")
    device: str = option("cpu", "cpu, cuda, cuda:1.", group="Device")


@command_of(GenerateRequest, "generate")
def command(request: GenerateRequest) -> None:
    """Continue a text with a trained model, and show each token at once.

    ctrans integrates a training run's model as it was trained, and a model saved alone as the
    discrete model. A model of bytes prints text in UTF-8, with � for invalid bytes. A model with
    another vocabulary prints token ids.

    \b
    ctrans generate --checkpoint out/train --prompt "A class is"
    ctrans generate --checkpoint out/train/last --tokens 50 --temperature 0.5 --top-k 20 --samples 3
    """
    for seed in (request.seed, request.seed + request.samples - 1):
        Sampling(request.temperature, request.top_k, seed)
    check_outputs(request)
    device = get_device(request.device)
    checkpoint = find_model(request.checkpoint)
    model = load(checkpoint).to(device).requires_grad_(requires_grad=False).eval()
    if device.type == "cpu":
        choose_threads(
            flops(model.config.width, 1, model.config.context), next(model.parameters()).itemsize
        )
    prompt = encode(request.prompt, model.config.vocab_size)
    scheme = trained_with(checkpoint)
    if scheme != DISCRETE:
        say(f"integrated as it was trained, {options_for(scheme)}", error=True)
    show = _show_nothing if request.quiet else _write
    samples = []
    with progress_bar("generate", request.samples * request.tokens) as advance:
        for k in range(request.samples):
            progress = None
            if request.quiet:
                progress = partial(advance, f"sample {k + 1}")
            samples.append(
                _sample(model, prompt, request, request.seed + k, scheme, show, progress)
            )
            is_last = k + 1 == request.samples
            show("\n" if is_last else "\n---\n")
    table = measured(samples)
    result = plain(
        {
            **result_of(request, request.shown(), device),
            "measured": table.as_json(),
            "scheme": scheme,
            "prompt": prompt,
            "samples": samples,
        }
    )
    write_result(request, None, result, page_of_table(result, table))


def trained_with(directory: Path) -> Scheme:
    """The scheme of the training run that saved this checkpoint; the discrete model without one.

    Raises ConfigError for a damaged training state.
    """
    if not os.path.exists(directory / STATE):
        return DISCRETE
    config = read_state(directory).config
    method = get_method(config.method)
    changes_the_method = get_gradient(config.gradient).scheme(method) is not method
    gradient = config.gradient if changes_the_method else DISCRETE.gradient
    return Scheme(config.method, config.steps, config.rtol, config.atol, gradient)


def options_for(scheme: Scheme) -> str:
    """The options of `ctrans train` for this scheme."""
    fields = dataclasses.asdict(scheme).items()
    return " ".join(
        f"--{name} {value}" for name, value in fields if value != getattr(DISCRETE, name)
    )


def encode(prompt: str, vocabulary: int) -> list[int]:
    """The prompt's bytes, or its token ids for a vocabulary other than bytes. An empty text is a
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
            f"prompt {prompt!r}: this model's vocabulary of {vocabulary} is not bytes; give token"
            f" ids from 0 to {vocabulary - 1}, as in --prompt '15 7 3'"
        )
    return ids


def decoder(vocabulary: int) -> Decode:
    """A function that gives the text of a token, from the token and whether it is the last."""
    if vocabulary == VOCABULARY:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token, *, last: utf8.decode(bytes([token]), last)
    return lambda token, *, last: f"{token}" if last else f"{token} "


def _sample(
    model: GPT,
    prompt: list[int],
    request: GenerateRequest,
    seed: int,
    scheme: Scheme,
    show: Callable[[str], None],
    progress: Callable[[], None] | None,
) -> dict[str, Any]:
    """The continuation of that seed, and how many seconds it took. Shows the prompt and each
    token.
    """
    started = time.perf_counter()
    decode = decoder(model.config.vocab_size)
    sampling = Sampling(request.temperature, request.top_k, seed)
    device = model.token_embedding.weight.device
    prompt_ids = torch.tensor(prompt, device=device)
    continuation = stream(model, prompt_ids, request.tokens, sampling, scheme)
    show("".join(decode(token, last=False) for token in prompt))
    tokens = []
    pieces = []
    for token in map(int, continuation):
        tokens.append(token)
        pieces.append(decode(token, last=len(tokens) == request.tokens))
        show(pieces[-1])
        if progress is not None:
            progress()
    return {
        "seed": seed,
        "tokens": tokens,
        "text": "".join(pieces),
        "seconds": time.perf_counter() - started,
    }


def _show_nothing(piece: str) -> None:
    """Stands for `_write` where stdout holds the JSON only."""


def _write(piece: str) -> None:
    encoding = sys.stdout.encoding
    say(piece.encode(encoding, "replace").decode(encoding), end="")
