"""Does the verdict on the transfer of learning rates hold in training? `python -m
benchmarks.transfer --minutes 20`, then `--report`.

Twelve parametrisations, six right and six wrong by theory, are trained at three widths and three
depths, each for 16 updates on one batch. The rule of the truth was set before the first run. At
each size the learning rate is searched in factors of 2 until the lowest mean loss of three seeds
has a higher one on both sides. The best rate is the vertex of the parabola through these three
losses. The rate moves along an axis if the best rates at the smallest and at the largest size
differ by more than a factor of 2. A parametrisation transfers if its rate moves along no axis. (A
first task, 60 updates on fresh text, was given up after 39 runs of one case. Its losses differed
less between neighbouring rates than between seeds.)

The verdict comes from `transfer_check` with 3 updates and 3 seeds, at a quarter and a sixteenth of
the base's best rate. Its limit, its sizes and rates, and the small initial head were chosen by the
exponents of seven of these models, before any of them was trained. Two things came after the first
table: a place that is only rescaled on its way out counts no more (the residual MLP showed why),
and four cases were also trained at 64 blocks. Runs are kept in benchmarks/results/transfer and made
once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctrans.base.threads import wait_passively

wait_passively()

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.measure.forward.weight_scaling import log_slope
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, next_token_loss
from ctrans.model.parametrisation import PARAMETRISATIONS, STANDARD, Parametrisation
from ctrans.training.coordinate_check import FLAT, SMALL_HEAD, Transfer, transfer_check
from ctrans.training.data_sources import source_of
from ctrans.training.schedule import learning_rate
from ctrans.training.settings import TrainConfig

FOLDER = Path(__file__).parent / "results" / "transfer"
RUNS, CHECKS = FOLDER / "runs.jsonl", FOLDER / "checks.jsonl"
WIDTHS, DEPTHS = (32, 96, 256), (2, 6, 16)
DEEP = 64
CHECK_WIDTHS, CHECK_DEPTHS = (32, 64, 128, 256), (4, 8, 16, 32)
SEEDS, CHECK_SEEDS = 3, 3
SETTINGS = TrainConfig(batch=4, iterations=16, warmup=2, weight_decay=0.0)
CONTEXT, HEAD, WORST = 32, 16, 8.0
TOKENS, TARGETS = source_of(None, CONTEXT)[1].batch(0, 0, batch=SETTINGS.batch, seed=0)
COMPLETEP, MUP = PARAMETRISATIONS["completep"], PARAMETRISATIONS["mup"]
PRE: Mapping[str, Any] = {
    "placement": "pre",
    "initialisation": "lecun",
    "embedding_std": 1.0,
    "tied": False,
}
LLAMA: Mapping[str, Any] = {
    **PRE,
    "placement": "peri",
    "norm": "rmsnorm",
    "ffn": "swiglu",
    "bias": False,
}
PARALLEL: Mapping[str, Any] = {**PRE, "parallel_blocks": True, "dt": 0.5}


@dataclasses.dataclass(frozen=True)
class OfGPT:
    """A GPT on four rows of text."""

    rules: Parametrisation
    optimiser: str = "adamw"
    fields: Mapping[str, Any] = dataclasses.field(default_factory=lambda: PRE)
    decay: float = 0.0

    def build(self, width: int, depth: int) -> nn.Module:
        PARAMETRISATIONS["case"] = self.rules
        base = (
            {}
            if self.rules == PARAMETRISATIONS[STANDARD]
            else {"base_width": WIDTHS[0], "base_depth": DEPTHS[0]}
        )
        scaled = {"parametrisation": "case" if base else STANDARD, **base}
        config = GPTConfig(
            context=CONTEXT, width=width, heads=width // HEAD, depth=depth, **self.fields, **scaled
        )
        made = GPT(config, seed=torch.initial_seed())
        made.unembedding.weight.data.mul_(SMALL_HEAD)
        return made

    def optimise(self, module: nn.Module, rate: float) -> torch.optim.Optimizer:
        assert isinstance(module, GPT)
        PARAMETRISATIONS["case"] = self.rules
        settings = dataclasses.replace(
            SETTINGS, optimiser=self.optimiser, learning_rate=rate, weight_decay=self.decay
        )
        return settings.make_optimiser(module.parameters(), model=module)

    def loss(self, module: nn.Module) -> Tensor:
        return next_token_loss(module(TOKENS)[0], TARGETS)


class Residual(nn.Module):
    """x + branch W_2 relu(W_1 x) for each of `depth` blocks, written without ctrans."""

    def __init__(self, width: int, depth: int, branch: float, readout: float):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.branch, self.readout = branch, readout
        for block in self.blocks:
            for part in (block[0], block[2]):
                nn.init.normal_(part.weight, 0.0, width**-0.5)
        nn.init.normal_(self.leave.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + self.branch * block(x)
        return self.readout * self.leave(x)


@dataclasses.dataclass(frozen=True)
class OfResidual:
    """A residual MLP with its own muP for Adam; `deeper` is the power of the depth in the rate of
    its hidden weights.
    """

    deeper: float = 0.0

    def build(self, width: int, depth: int) -> nn.Module:
        return Residual(width, depth, 1 / depth, 1 / width)

    def optimise(self, module: nn.Module, rate: float) -> torch.optim.Optimizer:
        assert isinstance(module, Residual)
        width, deeper = (
            module.leave.weight.shape[1],
            (len(module.blocks) / DEPTHS[0]) ** self.deeper,
        )
        hidden = [p for p in module.blocks.parameters() if p.dim() == 2]
        biases = [p for p in module.blocks.parameters() if p.dim() == 1]
        rest = [*module.enter.parameters(), *module.leave.parameters()]
        scales = (deeper * WIDTHS[0] / width, deeper, 1.0)
        groups = [
            {"params": p, "lr": rate * s, "scale": s}
            for p, s in zip((hidden, biases, rest), scales, strict=True)
        ]
        return torch.optim.Adam(groups, lr=rate)

    def loss(self, module: nn.Module) -> Tensor:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
        target = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4].abs()
        return F.mse_loss(module(x), target)


@dataclasses.dataclass(frozen=True)
class Case:
    """A parametrisation with what theory says of it, and the rate (a power of 2) at which its
    search begins.
    """

    of: Any
    right: bool
    start: int
    counted: bool = True


def changed(rules: Parametrisation, **fields: Any) -> Parametrisation:
    return dataclasses.replace(rules, **fields)


CASES: dict[str, Case] = {
    "CompleteP, AdamW, pre": Case(OfGPT(COMPLETEP), right=True, start=-7),
    "CompleteP, AdamW, peri RMSNorm SwiGLU": Case(
        OfGPT(COMPLETEP, fields=LLAMA), right=True, start=-7
    ),
    "CompleteP, AdamW, parallel blocks, dt 0.5": Case(
        OfGPT(COMPLETEP, fields=PARALLEL), right=True, start=-7
    ),
    "CompleteP, Muon, pre": Case(OfGPT(COMPLETEP, "muon"), right=True, start=-5),
    "CompleteP, SGD, pre": Case(OfGPT(COMPLETEP, "sgd"), right=True, start=-4),
    "residual MLP of its own, 1/L and muP": Case(OfResidual(), right=True, start=-7),
    "standard, AdamW": Case(OfGPT(PARAMETRISATIONS[STANDARD]), right=False, start=-7),
    "standard, Muon": Case(OfGPT(PARAMETRISATIONS[STANDARD], "muon"), right=False, start=-5),
    "muP, blocks unscaled": Case(OfGPT(MUP), right=False, start=-7),
    "1/L^(1/2), rate unscaled in depth": Case(
        OfGPT(changed(COMPLETEP, branch=-0.5)), right=False, start=-7
    ),
    "CompleteP, hidden rates divided by the width twice": Case(
        OfGPT(changed(COMPLETEP, rates=2.0)), right=False, start=-7
    ),
    "residual MLP of its own, rate divided by L as well": Case(
        OfResidual(-1.0), right=False, start=-7
    ),
    "depth muP, AdamW": Case(
        OfGPT(PARAMETRISATIONS["depth_mup"]), right=False, start=-7, counted=False
    ),
}
"""The last one is not counted: theory (2505.01618) calls it lazy, and does not say that its rate
moves.
"""


def shape(case: Case, width: int, depth: int) -> str:
    """What determines a run except for its rate and seed, so that equal models are trained once."""
    torch.manual_seed(0)
    module = case.of.build(width, depth)
    groups = [
        (g.get("scale", 1.0), g.get("eps"), g["weight_decay"], len(g["params"]))
        for g in case.of.optimise(module, 1.0).param_groups
    ]
    if isinstance(module, GPT):
        config = module.config
        what: Any = (
            {**case.of.fields},
            case.of.optimiser,
            config.step_length,
            config.times_wider**config.rules.logits,
            float(sum(p.detach().double().abs().sum() for p in module.parameters())),
        )
    else:
        what = (module.branch, module.readout)
    return json.dumps([type(case.of).__name__, width, depth, what, groups], sort_keys=True)


def train(case: Case, width: int, depth: int, power: float, seed: int) -> float:
    """The loss at the end, at most `WORST`."""
    torch.manual_seed(seed + 100)
    module = case.of.build(width, depth)
    settings = dataclasses.replace(SETTINGS, learning_rate=2.0**power)
    optimiser = case.of.optimise(module, 2.0**power)
    for step in range(settings.iterations):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(settings, step) * group.get("scale", 1.0)
        optimiser.zero_grad()
        loss = case.of.loss(module)
        if not math.isfinite(loss.item()):
            return WORST
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        found = float(case.of.loss(module))
    return min(found, WORST) if math.isfinite(found) else WORST


class Store:
    """Runs by shape, rate and seed."""

    def __init__(self, until: float):
        self.until = until
        self.losses: dict[tuple[str, float, int], float] = {}
        self.seconds = 0.0
        for row in rows(RUNS):
            self.losses[row["shape"], row["power"], row["seed"]] = row["loss"]
            self.seconds += row["seconds"]

    def loss(self, case: Case, width: int, depth: int, power: float) -> float:
        what, found = shape(case, width, depth), []
        for seed in range(SEEDS):
            if (what, power, seed) not in self.losses:
                if time.monotonic() > self.until:
                    raise TimeoutError
                began = time.process_time()
                loss = train(case, width, depth, power, seed)
                self.losses[what, power, seed] = loss
                seconds = time.process_time() - began
                self.seconds += seconds
                add(
                    RUNS,
                    {
                        "shape": what,
                        "power": power,
                        "seed": seed,
                        "loss": loss,
                        "seconds": round(seconds, 2),
                    },
                )
            found.append(self.losses[what, power, seed])
        return sum(found) / len(found)

    def best(self, case: Case, width: int, depth: int, start: int) -> float:
        """log2 of the best rate at this size, by the rule of the module's docstring."""
        losses = {start + k: self.loss(case, width, depth, start + k) for k in (-1, 0, 1)}
        while (at := min(losses, key=lambda power: losses[power])) in (min(losses), max(losses)):
            further = at - 1 if at == min(losses) else at + 1
            if abs(further - start) > 9:
                return math.nan
            losses[further] = self.loss(case, width, depth, further)
        low, here, high = (losses[at + k] for k in (-1, 0, 1))
        return at + (low - high) / (2 * (low - 2 * here + high))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _size(found: dict[tuple[str, int], float], name: str, update: int) -> Any:
    def hook(part: nn.Module, given: Any, output: Any) -> None:
        found[name, update] = float(
            (output[0] if isinstance(output, tuple) else output).detach().abs().mean()
        )

    return hook


def sizes_after(case: Case, rate: float) -> bool:
    """mup's own check: whether no module's mean |output| grows with the width, at the start and
    after 3 updates.
    """
    found: dict[int, dict[tuple[str, int], float]] = {}
    for width in CHECK_WIDTHS:
        torch.manual_seed(0)
        module = case.of.build(width, DEPTHS[0])
        optimiser, mine = case.of.optimise(module, rate), found.setdefault(width, {})
        for update in range(4):
            handles = [
                part.register_forward_hook(_size(mine, name, update))
                for name, part in module.named_modules()
            ]
            optimiser.zero_grad()
            case.of.loss(module).backward()
            for handle in handles:
                handle.remove()
            optimiser.step()
    return all(
        log_slope(CHECK_WIDTHS, [found[w][place] for w in CHECK_WIDTHS]) < FLAT
        for place in found[CHECK_WIDTHS[0]]
    )


def check(case: Case, base: float) -> dict[str, Any]:
    began = time.process_time()
    found: Transfer = transfer_check(
        case.of.build,
        case.of.optimise,
        case.of.loss,
        widths=CHECK_WIDTHS,
        depths=CHECK_DEPTHS,
        rates=(2.0**base / 16, 2.0**base / 4),
        seeds=CHECK_SEEDS,
    )
    seconds = time.process_time() - began
    worst = {axis: found.worst(axis) for axis in found.sizes}
    return {
        "verdict": found.verdict,
        "axes": {
            axis: [each.verdict, each.place, each.exponent, each.error]
            for axis, each in worst.items()
        },
        "mup": sizes_after(case, 2.0**base / 4),
        "seconds": round(seconds, 1),
    }


FURTHER = (
    "CompleteP, AdamW, pre",
    "muP, blocks unscaled",
    "1/L^(1/2), rate unscaled in depth",
    "depth muP, AdamW",
)
"""Cases that are also trained at `DEEP` blocks."""


def further(store: Store) -> None:
    """The factor of the best rate from the base to `DEEP` blocks."""
    print(f"\nFrom {DEPTHS[0]} to {DEEP} blocks, best rate times")
    for name in FURTHER:
        base = store.best(CASES[name], WIDTHS[0], DEPTHS[0], CASES[name].start)
        print(
            f"    {name}:"
            f" {2 ** (store.best(CASES[name], WIDTHS[0], DEEP, round(base)) - base):.2f}",
            flush=True,
        )


def carry_out(store: Store) -> None:
    checked = {row["case"] for row in rows(CHECKS)}
    for name, case in CASES.items():
        base = store.best(case, WIDTHS[0], DEPTHS[0], case.start)
        print(f"{name}: best rate at the base 2^{base:.2f}", flush=True)
        if name not in checked:
            add(CHECKS, {"case": name, "base": base, **check(case, base)})
            print("   ", rows(CHECKS)[-1], flush=True)
        moves = moved(store, case, base)
        print(
            "    best rates:",
            {axis: [round(each, 2) for each in found] for axis, found in moves.items()},
            flush=True,
        )


def moved(store: Store, case: Case, base: float) -> dict[str, list[float]]:
    """log2 of the best rates by axis."""
    found = {"width": [base], "depth": [base]}
    for axis, sizes in (
        ("width", [(w, DEPTHS[0]) for w in WIDTHS[1:]]),
        ("depth", [(WIDTHS[0], d) for d in DEPTHS[1:]]),
    ):
        for size in sizes:
            last = found[axis][-1]
            found[axis].append(
                store.best(case, *size, round(last if math.isfinite(last) else base))
            )
    return found


def report(store: Store) -> None:
    checks = {row["case"]: row for row in rows(CHECKS)}
    hits = {"this check": 0, "over widths alone": 0, "mup's check": 0, "theory": 0}
    count = 0
    for name, case in CASES.items():
        base = store.best(case, WIDTHS[0], DEPTHS[0], case.start)
        moves, found = moved(store, case, base), checks[name]
        factors = {axis: 2 ** (each[-1] - each[0]) for axis, each in moves.items()}
        truth = all(0.5 <= factor <= 2 for factor in factors.values())
        said = {
            "this check": found["verdict"] == "transfers",
            "over widths alone": found["axes"]["width"][0] == "transfers",
            "mup's check": found["mup"],
            "theory": case.right,
        }
        undecided = found["verdict"] == "undecided"
        if case.counted:
            count += 1
            for who, says in said.items():
                hits[who] += says == truth and not (who == "this check" and undecided)
        axes = "; ".join(
            f"{axis}^{k:+.2f} +- {error:.2f} at {place}"
            for axis, (_, place, k, error) in found["axes"].items()
        )
        print(f"{name}{'' if case.counted else ' (not counted)'}")
        print(
            f"    theory: {'right' if case.right else 'wrong'}; trained: best rate"
            f" x{factors['width']:.2f} over widths, ",
            end="",
        )
        print(f"x{factors['depth']:.2f} over depths: {'transfers' if truth else 'moves'}")
        print(
            f"    verdict: {found['verdict']} ({axes}); mup's check:"
            f" {'passes' if found['mup'] else 'fails'}"
        )
    print(f"\nRight of {count}: " + ", ".join(f"{who} {right}" for who, right in hits.items()))
    seconds = sum(row["seconds"] for row in checks.values())
    print(
        f"{len(store.losses)} runs, {store.seconds / 60:.1f} minutes of processor time; the checks"
        f" took {seconds / 60:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(0.0 if options.report else time.monotonic() + 60 * options.minutes)
    if not options.report:
        carry_out(store)
    report(store)
    further(store)


if __name__ == "__main__":
    main()
