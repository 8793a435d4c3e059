"""Compares our training with nanoGPT's: the same weights, batches and settings, pre-LN with dt = 1;
losses, tokens per second, memory.

python benchmarks/training.py --nanogpt PATH     # PATH: a checkout of nanoGPT; without it only ours is measured

On the CPU: 4 blocks, width 128, context 64, batch 12, float32. On a GPU: GPT-2 124M, context 1024,
batch 12, bfloat16, compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

# in place of this file's own folder, so that imports find the packages
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from torch import nn

from benchmarks.memory import peak_bytes
from benchmarks.record import keep
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.text import default_text
from ctrans.training.data import Data, from_text
from ctrans.training.loop import TrainingRun
from ctrans.training.parallel import get_parallel
from ctrans.training.processes import Processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import anew
from ctrans.training.schedule import learning_rate
from ctrans.training.settings import TrainConfig

LOSSES = 20
ROUNDS, ITERATIONS = 15, 20
Iterate = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Case:
    """What both train."""

    title: str
    device: torch.device
    model: GPTConfig
    train: TrainConfig


SIZES = {"small": (2, 64, 32, 8), "medium": (4, 128, 64, 12), "large": (6, 256, 128, 8)}
"""Blocks, width, context and batch on the CPU; heads of width 32."""


def case(size: str = "medium", *, compiled: bool = False) -> Case:
    shape = {"placement": "pre", "bias": False}
    settings = {
        "learning_rate": 1e-3,
        "warmup": 100,
        "iterations": 100_000,
        "min_learning_rate": 1e-3,
    }
    if torch.cuda.is_available():
        model = GPTConfig(vocab_size=50304, context=1024, depth=12, width=768, heads=12, **shape)
        rates = {"learning_rate": 6e-4, "min_learning_rate": 6e-4}
        train = TrainConfig(**{**settings, **rates}, batch=12, dtype="bfloat16", compile=True)
        return Case(
            "GPT-2 124M, context 1024, batch 12, bfloat16, compiled",
            torch.device("cuda"),
            model,
            train,
        )
    depth, width, context, batch = SIZES[size]
    model = GPTConfig(
        vocab_size=256, context=context, depth=depth, width=width, heads=width // 32, **shape
    )
    title = (
        f"{depth} blocks, width {width}, context {context}, batch {batch},"
        f" float32{', compiled' if compiled else ''}"
    )
    return Case(
        title, torch.device("cpu"), model, TrainConfig(**settings, batch=batch, compile=compiled)
    )


def ours(case: Case, data: Data, directory: Path) -> TrainingRun:
    alone = Processes(case.device)
    model = GPT(case.model, seed=0)
    return anew(
        model,
        case.train,
        data,
        RunDirectory(directory),
        get_parallel("none", case.train),
        alone,
        source={},
    )[0]


def copied(theirs: nn.Module, model: GPT) -> None:
    """Gives nanoGPT's model the weights of ours."""
    pairs = {
        "transformer.wte": model.token_embedding,
        "transformer.wpe": model.position_embedding,
        "transformer.ln_f": model.final_norm,
    }
    sublayers = list(model.depth.sublayers)
    for i, (attention, ffn) in enumerate(zip(sublayers[::2], sublayers[1::2], strict=True)):
        block = f"transformer.h.{i}"
        pairs |= {
            f"{block}.ln_1": attention.input_norm,
            f"{block}.attn.c_attn": attention.field.qkv,
        }
        pairs |= {f"{block}.attn.c_proj": attention.field.out, f"{block}.ln_2": ffn.input_norm}
        pairs |= {f"{block}.mlp.c_fc": ffn.field.up, f"{block}.mlp.c_proj": ffn.field.down}
    own = dict(theirs.named_parameters())
    assert {f"{name}.weight" for name in pairs} == own.keys(), (
        "nanoGPT has other parameters than expected"
    )
    with torch.no_grad():
        for name, module in pairs.items():
            own[f"{name}.weight"].copy_(module.weight)


def nanogpt(module: ModuleType, case: Case, model: GPT) -> tuple[nn.Module, torch.optim.Optimizer]:
    shape = case.model
    config = module.GPTConfig(
        shape.context,
        shape.vocab_size,
        shape.depth,
        shape.heads,
        shape.width,
        dropout=0.0,
        bias=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = module.GPT(config).to(case.device)
        copied(theirs, model)
        train = case.train
        optimiser = theirs.configure_optimizers(
            train.weight_decay, train.learning_rate, (train.beta1, train.beta2), case.device.type
        )
    return (torch.compile(theirs) if case.train.compile else theirs), optimiser


def their_iteration(
    theirs: nn.Module, optimiser: torch.optim.Optimizer, case: Case, data: Data
) -> Iterate:
    """An iteration of nanoGPT's train.py, on our batches."""
    precision = (
        torch.autocast("cuda", torch.bfloat16)
        if case.train.dtype == "bfloat16"
        else contextlib.nullcontext()
    )

    def iterate(step: int) -> float:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(case.train, step)
        tokens, targets = data.batch(step, 0, batch=case.train.batch, seed=case.train.seed)
        with precision:
            _, loss = theirs(
                tokens.to(case.device), targets.to(case.device).contiguous()
            )  # it views them
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), case.train.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return float(loss.detach())

    return iterate


def our_iteration(run: TrainingRun) -> Iterate:
    return lambda step: float(run.iterate(step)["loss"])


def tokens_per_second(
    iterations: dict[str, Iterate], case: Case, rounds: int
) -> dict[str, list[float]]:
    """Rounds of iterations taken turn by turn, so that a slow moment of the machine hits both."""
    rates: dict[str, list[float]] = {name: [] for name in iterations}
    for round_ in range(rounds + 1):
        for name, iterate in iterations.items():
            start = time.perf_counter()
            for i in range(ITERATIONS):
                iterate(LOSSES + round_ * ITERATIONS + i)
            if round_:  # the first warms up
                rates[name].append(
                    ITERATIONS
                    * case.train.batch
                    * case.model.context
                    / (time.perf_counter() - start)
                )
    return rates


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    if spec is None or spec.loader is None or not (path / "model.py").exists():
        sys.exit(f"{path} has no model.py: give a checkout of nanoGPT")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compare(path: Path | None, rounds: int = ROUNDS) -> list[str]:
    """Losses, tokens per second and memory of ours, and of the code in that checkout of nanoGPT."""
    this = case()
    data = from_text(default_text(), this.model.context)
    lines = [f"Pre-LN, dt = 1: {this.title}; {torch.get_num_threads()} threads."]
    with tempfile.TemporaryDirectory() as directory:
        run = ours(this, data, Path(directory))
        iterations = {"ctrans": our_iteration(run)}
        if path is not None:
            iterations["nanoGPT"] = their_iteration(
                *nanogpt(load(path), this, run.model), this, data
            )
        losses = {
            name: [iterate(step) for step in range(LOSSES)] for name, iterate in iterations.items()
        }
        rates = tokens_per_second(iterations, this, rounds)
        step = LOSSES + (rounds + 1) * ITERATIONS
        peaks = {
            name: peak_bytes(lambda iterate=iterate: iterate(step))
            for name, iterate in iterations.items()
        }
    for name in iterations:
        lines.append(
            f"{name:>8}: {statistics.median(rates[name]):10.0f} tokens/s ({min(rates[name]):.0f} to"
            f" {max(rates[name]):.0f}), peak of an iteration above what stays"
            f" {peaks[name] / 2**20:.1f} MiB, loss {losses[name][0]:.6f} to {losses[name][-1]:.6f}"
        )
    if path is not None:
        gap = max(abs(a - b) for a, b in zip(losses["ctrans"], losses["nanoGPT"], strict=True))
        ratio = statistics.median(
            a / b for a, b in zip(rates["ctrans"], rates["nanoGPT"], strict=True)
        )
        lines.append(
            f"Largest difference of the losses of {LOSSES} steps: {gap:.1e}. Tokens per second,"
            f" ours over theirs: {ratio:.3f}."
        )
    else:
        lines.append("nanoGPT was not given (--nanogpt PATH): ours alone.")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    keep("training", compare(parser.parse_args().nanogpt))
