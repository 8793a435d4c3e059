"""Compares our gradients with torchdiffeq's adjoint: gradient error, saved bytes, peak memory and
time against the number of steps.

It also measures the activation memory of a model of 48 blocks.

python benchmarks/gradients.py
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find this file
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
import torchdiffeq
from torch import Tensor, nn

from benchmarks.memory import peak_bytes, saved_bytes
from benchmarks.record import keep
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import METHODS, SolveError, solve
from solvers.reversible import COUPLING
from solvers.reversible_scheme import ReversibleScheme

STEPS = (8, 32, 128, 512)
ROUNDS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Gradient = Callable[[GPT, Tensor, int], Tensor]


def problem(dtype: torch.dtype) -> tuple[GPT, Tensor]:
    """Four unit segments of a peri model, width 128, and a state of 2 x 64 tokens."""
    config = GPTConfig(
        vocab_size=8,
        context=64,
        depth=2,
        width=128,
        heads=4,
        placement="peri",
        initialisation="xavier",
    )
    x0 = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0))
    return GPT(config).to(DEVICE, dtype), x0.to(DEVICE, dtype)


def ours(kind: str, method: str = "euler") -> Gradient:
    return lambda model, x0, n: (
        solve(model.depth.segments(), x0, method=method, steps=n // 4, gradient=kind).x1
    )


def scheme(model: GPT, x0: Tensor, n: int) -> Tensor:
    """What `reversible` computes, differentiated by backprop."""
    return solve(
        model.depth.segments(),
        x0,
        method=ReversibleScheme(METHODS["euler"], COUPLING),
        steps=n // 4,
    ).x1


class Field(nn.Module):
    """A segment as torchdiffeq's users write it."""

    def __init__(self, sublayer: nn.Module):
        super().__init__()
        self.sublayer = sublayer

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.sublayer(x)


def theirs(model: GPT, x: Tensor, n: int) -> Tensor:
    times = torch.tensor([0.0, 1.0], device=x.device)
    for sublayer in model.depth.sublayers:
        x = torchdiffeq.odeint_adjoint(
            Field(sublayer), x, times, method="euler", options={"step_size": 4 / n}
        )[-1]
    return x


KINDS: dict[str, tuple[Gradient, Gradient]] = {
    # what it computes, and whose float64 gradient it should have
    "backprop": (ours("backprop"), ours("backprop")),
    "checkpoint": (ours("checkpoint"), ours("backprop")),
    "reversible": (ours("reversible"), scheme),
    "adjoint": (ours("adjoint"), ours("backprop")),
    "odeint_adjoint": (theirs, ours("backprop")),
}


def gradients(end: Gradient, dtype: torch.dtype, n: int) -> list[Tensor]:
    model, x0 = problem(dtype)
    x0.requires_grad_()
    weights = list(model.depth.parameters())
    weight = torch.linspace(-1, 1, x0.numel(), device=DEVICE, dtype=dtype).view_as(x0)
    return list(torch.autograd.grad((end(model, x0, n) * weight).sum(), [x0, *weights]))


def apart(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
    gap = sum(
        float((a.double() - b.double()).square().sum()) for a, b in zip(these, those, strict=True)
    )
    return math.sqrt(gap / sum(float(b.double().square().sum()) for b in those))


def pass_through(end: Gradient, n: int) -> Callable[[], object]:
    model, x0 = problem(torch.float32)
    x0.requires_grad_()

    def run() -> None:
        end(model, x0, n).square().sum().backward()
        finish()

    return run


def finish() -> None:
    """Waits until the device has done all that it was told."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(works: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Times taken turn by turn, so that a slow moment of the machine hits all."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(ROUNDS):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - start)
    return taken


def stops(end: Gradient, n: int) -> bool:
    """Whether a kind refuses to go on, in either precision, as `reversible` does where its pair of
    states comes apart.
    """
    try:
        for dtype in (torch.float64, torch.float32):
            end(*problem(dtype), n)
    except SolveError:
        return True
    return False


def table(steps: Sequence[int] = STEPS) -> list[str]:
    lines = [
        (
            "Four segments of a peri model (width 128, 2 x 64 tokens), Euler. Error: float64,"
            " relative, against backprop through what"
        ),
        (
            "the kind computes; float32 beside it. Saved: bytes that autograd keeps. Peak: most"
            " bytes held at once, gradients included."
        ),
        "Time: median of a forward and backward pass, and its ratio to backprop's.",
        "",
        (
            f"{'steps':>5} {'gradient':>15} {'error 64':>9} {'error 32':>9} {'saved MiB':>10}"
            f" {'peak MiB':>9} {'ms':>9} {'ratio':>6}"
        ),
    ]
    for n in steps:
        stopped = {name for name, (end, _) in KINDS.items() if stops(end, n)}
        taken = seconds(
            {name: pass_through(end, n) for name, (end, _) in KINDS.items() if name not in stopped}
        )
        for name, (end, reference) in KINDS.items():
            if name in stopped:
                lines.append(
                    f"{n:>5} {name:>15} stops and says so: steps this coarse drive the pair of"
                    " states apart"
                )
                continue
            exact = gradients(reference, torch.float64, n)
            errors = [
                apart(gradients(end, dtype, n), exact) for dtype in (torch.float64, torch.float32)
            ]
            model, x0 = problem(torch.float32)
            x0.requires_grad_()
            saved = saved_bytes(
                lambda end=end, model=model, x0=x0, n=n: end(model, x0, n), list(model.parameters())
            )
            peak = peak_bytes(pass_through(end, n))
            ratio = statistics.median(
                a / b for a, b in zip(taken[name], taken["backprop"], strict=True)
            )
            lines.append(
                f"{n:>5} {name:>15} {errors[0]:>9.1e} {errors[1]:>9.1e} {saved / 2**20:>10.3f}"
                f" {peak / 2**20:>9.2f} {1e3 * statistics.median(taken[name]):>9.1f} {ratio:>6.2f}"
            )
    return lines


def deep_steps(blocks: int = 48, width: int = 256) -> dict[str, Callable[[], object]]:
    """A forward and backward pass of a training step by each kind of gradient; parameters,
    gradients and optimiser state are there.
    """
    config = GPTConfig(
        vocab_size=256, context=128, depth=blocks, width=width, heads=8, placement="peri", dt=0.1
    )
    model = GPT(config).to(DEVICE)
    optimiser = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (4, 129), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def back(end: Tensor) -> None:
        loss = nn.functional.cross_entropy(model.head(end).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        finish()

    def step(kind: str) -> None:
        back(solve(model.depth.segments(), model.embed(tokens[:, :-1]), gradient=kind).x1)

    def by_hand() -> None:
        x = model.embed(tokens[:, :-1])
        for sublayer in model.depth.sublayers:
            x = x + 0.1 * sublayer(x)
        back(x)

    step("backprop")
    optimiser.step()  # its state exists from here on, and every parameter has its gradient
    return {
        "hand loop": by_hand,
        **{
            kind: partial(step, kind)
            for kind in ("backprop", "checkpoint", "reversible", "adjoint")
        },
    }


def deep(blocks: int = 48, width: int = 256) -> list[str]:
    """The peak of a training step of so many blocks above parameters, gradients and optimiser
    state.
    """
    lines = [
        "",
        (
            f"{blocks} blocks of width {width}, 4 x 128 tokens, float32: peak above parameters,"
            " gradients and optimiser state."
        ),
    ]
    kinds = deep_steps(blocks, width)
    peaks = {kind: peak_bytes(work) for kind, work in kinds.items()}
    taken = seconds(kinds)
    for kind, peak in peaks.items():
        ratio = statistics.median(
            own / plain for own, plain in zip(taken[kind], taken["backprop"], strict=True)
        )
        lines.append(
            f"{kind:>12}: {peak / 2**20:8.1f} MiB, 1/{peaks['backprop'] / peak:.1f}, "
            f"{statistics.median(taken[kind]):.2f} s a pass, {ratio:.2f} of backprop's"
        )
    return lines


if __name__ == "__main__":
    keep("gradients", [*table(), *deep()])
