"""Remedies for high learning rates, each against the plain model: `python -m
benchmarks.reach.remedies --minutes 30`, then `--report`.

A remedy earns its place if it moves the largest stable rate tenfold at no loss of the best loss, on
two tasks. It is tried around `pre` at dt 1 and `peri` at dt 0.3, with the training, the rates (half
decades) and the seeds of the study. The norm of queries and keys and linear attention are the
study's own (`runs.jsonl`), at two seeds. The rows are in remedies.jsonl beside them; "none" are the
plain models.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from benchmarks.reach.__main__ import FILE, KEYS, add, data, key, rows
from benchmarks.reach.cases import AROUND, BASE, RATES, SEEDS, SETTINGS
from benchmarks.reach.report import DRAWS
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.study.outcomes import Floor, rate_by_floor
from ctrans.training.schedule import learning_rate
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS

ROWS = FILE.with_name("remedies.jsonl")
TRIED_ON = ("recall", "counting")
HELD = 0.09
"""The Frobenius norm of a held matrix, in units of sqrt(rows): the value at which the issue's `pre`
had velocities of rms at most 1.
"""
PLAIN = "none"
MEMORY = 0.9
"""Decay of the running mean of states."""


class Centred(nn.Module):
    """Removes the mean over all tokens of a batch before the final norm; in evaluation, a running
    mean, so that no token sees another.
    """

    def __init__(self, norm: nn.Module, width: int):
        super().__init__()
        self.norm = norm
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.mean((0, 1))
            self.mean = MEMORY * self.mean + (1 - MEMORY) * mean.detach()
        return self.norm(x - (mean if self.training else self.mean))


def centre(model: GPT) -> None:
    model.final_norm = Centred(model.final_norm, model.config.width)


def fix_offsets(model: GPT) -> None:
    """Biases and offsets of the depth stay as they are drawn, at 0."""
    for name, weight in model.depth.named_parameters():
        weight.requires_grad_("bias" not in name)


@torch.no_grad()
def hold(model: GPT) -> None:
    """Scales each matrix of the depth to |W|_F <= HELD sqrt(rows), and each vector to an rms of at
    most 1.
    """
    for weight in model.depth.parameters():
        most = (HELD if weight.dim() >= 2 else 1.0) * math.sqrt(weight.shape[0])
        weight.mul_(min(1.0, most / (float(weight.norm()) + 1e-30)))


@torch.no_grad()
def hold_vectors(model: GPT) -> None:
    """Scales each bias and offset of the depth to an rms of at most 0.1."""
    for name, weight in model.depth.named_parameters():
        if "bias" in name:
            weight.mul_(min(1.0, 0.1 * math.sqrt(weight.numel()) / (float(weight.norm()) + 1e-30)))


def adamw(model: GPT, settings: TrainConfig) -> list[torch.optim.Optimizer]:
    return [settings.make_optimiser(model.parameters())]


def muon(model: GPT, settings: TrainConfig) -> list[torch.optim.Optimizer]:
    """torch's Muon for the matrices of the depth, scaled to AdamW's update size, and AdamW for the
    rest.
    """
    matrices = [weight for weight in model.depth.parameters() if weight.dim() == 2]
    rest = [weight for weight in model.parameters() if not any(weight is one for one in matrices)]
    first = torch.optim.Muon(
        matrices,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [first, settings.make_optimiser(rest)]


def z_loss(logits: Tensor, counted: Tensor) -> Tensor:
    """1e-3 times the mean square of log sum exp of the logits with an answer."""
    return 1e-3 * logits[counted].logsumexp(-1).square().mean()


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What differs from the plain training."""

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[GPT], None] = lambda model: None
    optimisers: Callable[[GPT, TrainConfig], list[torch.optim.Optimizer]] = adamw
    penalty: Callable[[Tensor, Tensor], Tensor] = lambda logits, counted: logits.new_zeros(())
    after_step: Callable[[GPT], None] = lambda model: None


REMEDIES: dict[str, Remedy] = {
    PLAIN: Remedy(),
    "token mean removed": Remedy(prepare=centre),
    "weights held": Remedy(after_step=hold),
    "offsets held": Remedy(after_step=hold_vectors),
    "no offsets": Remedy(prepare=fix_offsets),
    "long warm-up": Remedy(settings={"warmup": 300}),
    "z-loss": Remedy(penalty=z_loss),
    "Muon": Remedy(optimisers=muon),
    "8 blocks": Remedy(fields={"depth": 8}),
    "8 blocks, same T": Remedy(fields={"depth": 8, "dt": 0.5}),
}
"""By name. "8 blocks, same T" multiplies dt by a half: CompleteP's rule for depth (arXiv
2505.01618); "8 blocks" is what it is against.
"""


def train(job: tuple[str, str, float, int]) -> dict[str, Any]:
    """One run as a row of the study."""
    torch.set_num_threads(1)
    task, name, rate, seed = job
    remedy, placement, dt = _read(name)
    fields = dict(remedy.fields) | {"dt": dt * remedy.fields.get("dt", 1.0)}
    model = GPT(
        GPTConfig(**TASKS[task].architecture, **{**BASE, "placement": placement, **fields}),
        seed=seed,
    )
    settings = TrainConfig(**{**SETTINGS, **remedy.settings}, learning_rate=rate, seed=seed)
    remedy.prepare(model)
    row = {"task": task, "name": name, "rate": rate, "seed": seed}
    loss = _end(model, task, settings, remedy)
    return {
        **row,
        "loss": loss if math.isfinite(loss) else None,
        "ending": "finished" if math.isfinite(loss) else "diverged",
    }


def _read(name: str) -> tuple[Remedy, str, float]:
    remedy, placement, dt = name.rsplit(" ", 2)
    return REMEDIES.get(remedy, Remedy()), placement, float(dt.removeprefix("dt="))


def _end(model: GPT, task: str, settings: TrainConfig, remedy: Remedy) -> float:
    """The validation loss at the end, as of `ctrans.training.loop`; nan if a loss or a gradient is
    not finite.
    """
    optimisers = remedy.optimisers(model, settings)
    for step in range(settings.iterations):
        tokens, targets = data(task).batch(step, 0, batch=settings.batch, seed=settings.seed)
        for group in (group for optimiser in optimisers for group in optimiser.param_groups):
            group["lr"] = learning_rate(settings, step)
        logits, loss = model(tokens, targets)
        (loss + remedy.penalty(logits, targets != -1)).backward()
        if not math.isfinite(
            loss.item() + float(nn.utils.clip_grad_norm_(model.parameters(), settings.clip))
        ):
            return math.nan
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        model.after_step()
        remedy.after_step(model)
    model.eval()
    with torch.no_grad():
        return float(model(*data(task).validation_windows(settings.eval_windows))[1])


def planned() -> list[tuple[str, str, float, int]]:
    """Two seeds of all remedies come first."""
    return [
        (task, f"{remedy} {placement} dt={dt:g}", rate, seed)
        for seeds in (SEEDS[:2], SEEDS[2:])
        for remedy in REMEDIES
        for task in TRIED_ON
        for placement, dt in AROUND
        for rate in RATES[:5]
        for seed in seeds
    ]


def plain_name(name: str) -> str:
    """The model that a remedy is against."""
    return " ".join([PLAIN, *name.rsplit(" ", 2)[1:]])


def table(task: str, found: list[dict[str, Any]]) -> list[str]:
    """For each remedy the ratio of largest stable rates and the difference of best losses, with 95%
    intervals of a bootstrap over seeds.
    """
    source = TASKS[task].data()
    floor = Floor(source.depthless_loss(), source.guess_loss())
    losses: dict[str, dict[float, dict[int, float]]] = {}
    for row in found:
        if row["task"] == task and any(f"{row['rate']:.4g}" == f"{rate:.4g}" for rate in RATES[:5]):
            losses.setdefault(row["name"], {}).setdefault(row["rate"], {})[row["seed"]] = (
                math.nan if row["loss"] is None else row["loss"]
            )
    lines = []
    for name in losses:
        plain = plain_name(name)
        if (
            name.rsplit(" ", 2)[0] in REMEDIES.keys() - {PLAIN}
            or name.split(" ")[0] in ("qk_norm", "linear")
        ) and plain in losses:
            lines.append(f"  {task}, {name}: {_beside(losses[name], losses[plain], floor)}")
    return lines


def _beside(
    of: dict[float, dict[int, float]], plain: dict[float, dict[int, float]], floor: Floor
) -> str:
    seeds = sorted(set.intersection(*({*each} for each in (*of.values(), *plain.values()))))

    def figures(chosen: list[int]) -> tuple[float, float, bool]:
        ends = [
            {rate: [each[seed] for seed in chosen] for rate, each in one.items()}
            for one in (of, plain)
        ]
        rates = [rate_by_floor(each, floor) for each in ends]
        means = [
            min(
                float(np.mean([x if math.isfinite(x) else floor.guess for x in each]))
                for each in one.values()
            )
            for one in ends
        ]
        known = rates[0].rate is not None and rates[1].rate is not None
        return (
            rates[0].rate / rates[1].rate if known else math.nan,
            means[0] - means[1],
            rates[0].at_least,
        )

    draws = np.random.default_rng(0)
    drawn = [
        figures([seeds[k] for k in draws.integers(0, len(seeds), len(seeds))])[:2]
        for _ in range(DRAWS)
    ]
    ratio, change, at_least = figures(seeds)
    low, high = np.nanquantile(np.array(drawn), (0.025, 0.975), axis=0)
    logs = [math.log(figures([seed])[0]) for seed in seeds]
    middle, around = (
        np.mean(logs),
        stats.t.ppf(0.975, len(logs) - 1) * np.std(logs, ddof=1) / math.sqrt(len(logs)),
    )
    return (
        f"rate {'>= ' if at_least else ''}x{ratio:.2f} ({low[0]:.2f} to {high[0]:.2f}; by t"
        f" {math.exp(middle):.2f}, {math.exp(middle - around):.2f} to"
        f" {math.exp(middle + around):.2f}), best loss {change:+.2f} ({low[1]:+.2f} to"
        f" {high[1]:+.2f}), {len(seeds)} seeds"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    if not options.report:
        done = {key(*(row[each] for each in KEYS)) for row in rows(ROWS)}
        add(ROWS, train, [job for job in planned() if key(*job) not in done], options)
    print(
        "Remedies beside the plain model, with 95% intervals of a bootstrap over seeds, and of"
        " Student's t over their logarithms"
    )
    for task in TRIED_ON:
        print("\n".join(table(task, rows(FILE) + rows(ROWS))))


if __name__ == "__main__":
    main()
