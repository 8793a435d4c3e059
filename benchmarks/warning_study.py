"""Does the monitor warn in time? 240 short trainings: half of the architectures set the thresholds,
the other half test them.

    python benchmarks/warning_study.py run                  # continues where it stopped; --only PART of a name, --threads 1
    python benchmarks/warning_study.py evaluate --half set     # the table, on the architectures that thresholds may be set on
    python benchmarks/warning_study.py evaluate --half sealed  # on the others: only when the thresholds are committed

A run keeps the monitor's log, and the loss and gradient norm of every step. So alarms with other
thresholds can be computed from the same run. Rates rise linearly over half of the run, so that a
rate that is too large is reached on the way. Definitions:

- A run *fails* if the mean loss of its last 30 steps is above the entropy of single bytes less
  `MARGIN`. It has then learned how often each byte comes, and no more. It also fails if its loss,
  as medians of 9 steps, ends `LEFT` above its own least value, or is not finite.
- Its loss *leaves* at the first step from which on it stays `LEFT` above the least so far, or
  `BEHIND` above that of the best rate on the same batches, whichever is earlier. If the best rate
  fails too, it leaves at the end.
- A run is *caught* if the monitor raised a danger at least 20 steps before that. The alarm is
  *false* if the run does not fail.

The two baselines read the loss, or the gradient norm, of each step. They warn if it is `factor`
deviations, or times, above the median of the 64 steps before. Their factors are set on the first
half too (`BASELINES`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # in place of this file's own folder

from ctrans.base.threads import wait_passively

wait_passively()

import numpy as np
import torch

from benchmarks.record import keep
from ctrans import GPT, GPTConfig
from ctrans.model.text import default_text
from ctrans.training.monitor import Monitor, read_log
from ctrans.training.monitor.alarms import Watch
from ctrans.training.monitor.past import Past
from ctrans.training.monitor.past_checks import gradient_spike, loss_spike

STEPS, WARM_UP, EVERY, BATCH = 300, 150, 5, 8
SIZE = {"vocab_size": 256, "context": 32, "depth": 4, "width": 32, "heads": 4}
RATES = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SEEDS = (0, 1, 2)
ARCHITECTURES: dict[str, dict[str, dict[str, Any]]] = {
    "set": {
        "pre": {"placement": "pre"},
        "peri-0.1": {"placement": "peri", "dt": 0.1, "embedding_std": 0.1},
        "post": {"placement": "post", "embedding_std": 1.0},
        "none-0.1": {"placement": "none", "dt": 0.1},
        "llama": {"placement": "pre", "norm": "rmsnorm", "ffn": "swiglu", "positions": "rotary"},
        "output": {"placement": "output", "embedding_std": 0.5},
        "pre-deep": {"placement": "pre", "depth": 8},
        "deepnorm": {"placement": "deepnorm", "embedding_std": 1.0},
    },
    "sealed": {
        "pre_post": {"placement": "pre_post", "embedding_std": 1.0},
        "peri": {"placement": "peri", "embedding_std": 0.5},
        "pre-xavier": {"placement": "pre", "initialisation": "xavier", "embedding_std": 0.1},
        "hybrid": {"placement": "post/pre", "embedding_std": 1.0},
        "output-rms": {
            "placement": "output",
            "norm": "rmsnorm",
            "ffn": "swiglu",
            "embedding_std": 0.5,
        },
        "qk-norm": {"placement": "pre", "qk_norm": True},
        "none": {"placement": "none"},
        "post-deep": {"placement": "post", "depth": 8, "embedding_std": 1.0},
    },
}
LEFT, BEHIND, MARGIN, AHEAD = 0.3, 0.25, 0.15, 20
BASELINES = {"loss spike": 8.0, "gradient spike": 20.0}
OUT = Path("out/warnings")


def names(half: str) -> list[str]:
    return [
        f"{name}/{rate:g}/{seed}"
        for name in ARCHITECTURES[half]
        for rate in RATES
        for seed in SEEDS
    ]


def run(half: str, name: str, out: Path) -> float:
    """One training and its log; seconds."""
    architecture, rate, seed = name.rsplit("/", 2)
    torch.manual_seed(int(seed))
    model = GPT(GPTConfig(**{**SIZE, **ARCHITECTURES[half][architecture]}), seed=int(seed))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.1)
    text = torch.frombuffer(bytearray(default_text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(int(seed) + 1000)
    monitor = Monitor(model, every=EVERY, out=out, total=STEPS)
    losses, norms, started = [], [], time.perf_counter()
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = float(rate) * min(1.0, (step + 1) / WARM_UP)
        places = torch.randint(len(text) - SIZE["context"] - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[p : p + SIZE["context"] + 1] for p in places.tolist()])
        loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        monitor.step(loss, optimiser, gradient_norm=norm)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        losses.append(float(loss.detach()))
        norms.append(float(norm))
        optimiser.step()
        optimiser.zero_grad()
    monitor.close()
    seconds = time.perf_counter() - started
    (out / "steps.json").write_text(
        json.dumps({"losses": losses, "norms": norms, "seconds": seconds})
    )
    return seconds


def smooth(losses: list[float]) -> np.ndarray:
    """Medians of the 9 steps up to each; a loss that is not finite counts as 99."""
    values = np.nan_to_num(np.array(losses), nan=99.0, posinf=99.0)
    return np.array([np.median(values[max(0, i - 8) : i + 1]) for i in range(len(values))])


def leaves(losses: list[float], best: np.ndarray, entropy: float) -> int | None:
    """The step at which the loss leaves for good; None for a run that does not fail."""
    curve = smooth(losses)
    above = curve > np.minimum.accumulate(curve) + LEFT
    learned = float(np.nan_to_num(np.array(losses[-30:]), nan=99.0, posinf=99.0).mean())
    if learned <= entropy - MARGIN and not above[-9:].all():
        return None
    inside = np.flatnonzero(~(above | (curve > best + BEHIND)))
    return min(len(curve), int(inside[-1]) + 2) if len(inside) else 1


def byte_entropy() -> float:
    """Of single bytes of the text, in nats."""
    shares = np.bincount(np.frombuffer(default_text(), dtype=np.uint8), minlength=256) / len(
        default_text()
    )
    return float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())


def replayed(path: Path) -> tuple[Past, list[tuple[int, str]], list[tuple[int, str]]]:
    """The alarms of a log under the rules as they are: all dangers, and of the loss and the
    gradient norm alone.
    """
    log, steps = read_log(path), json.loads((path / "steps.json").read_text())
    past = Past(log.header.places, log.header.heads, SIZE["vocab_size"])
    watch, told, alone = Watch(), [], []
    done = 0
    for report in log.reports:
        for i in range(done, report.step):
            past.losses.append((i + 1, steps["losses"][i]))
            past.norms.append((i + 1, steps["norms"][i]))
        done = report.step
        past.add(report.step, report.figures, _broken(report.figures))
        told += [
            (alarm.step, alarm.check) for alarm in watch.look(past) if alarm.severity != "note"
        ]
        for name, check in (("loss spike", loss_spike), ("gradient spike", gradient_spike)):
            if check(past, {**watch.limits[name], "factor": BASELINES[name]}) is not None:
                alone.append((report.step, name))
    return past, told, alone


def _broken(figures: dict[str, Any]) -> list[tuple[str, int]]:
    """As a log has it: a state that is not finite. What was not seen is nan too, but never the
    states.
    """
    return [("rms", k) for k, value in enumerate(figures["rms"]) if not np.isfinite(value)]


def evaluate(half: str) -> str:
    runs: dict[str, dict[str, Any]] = {}
    for name in names(half):
        path = OUT / half / name
        if (path / "steps.json").exists():
            _, told, alone = replayed(path)
            losses = json.loads((path / "steps.json").read_text())["losses"]
            runs[name] = {"losses": losses, "curve": smooth(losses), "told": told, "alone": alone}
    entropy = byte_entropy()
    for name, found in runs.items():
        found["leaves"] = leaves(found["losses"], _best(runs, name), entropy)
    failed = {name: found for name, found in runs.items() if found["leaves"] is not None}
    good = {name: found for name, found in runs.items() if found["leaves"] is None}
    lines = [
        (
            f"{half}: {len(runs)} runs, {len(failed)} fail"
            f" ({100 * len(failed) / max(1, len(runs)):.0f}%), {len(good)} do not"
        ),
        "",
    ]
    lines.append(
        f"{'warned by':34s}{'caught >= 20 before':>20s}{'false alarms':>14s}{'median lead':>13s}"
    )
    judges = {
        "the monitor": lambda found: [step for step, _ in found["told"]],
        "loss spike alone": lambda found: [
            step for step, name in found["alone"] if name == "loss spike"
        ],
        "gradient norm alone": lambda found: [
            step for step, name in found["alone"] if name == "gradient spike"
        ],
    }
    for said, judge in judges.items():
        leads = [found["leaves"] - min(judge(found), default=10**6) for found in failed.values()]
        warned = [lead for lead in leads if lead > -(10**5)]
        median = f"{statistics.median(warned):.0f}" if warned else "-"
        caught = _share(sum(lead >= AHEAD for lead in leads), len(failed))
        false = _share(sum(bool(judge(found)) for found in good.values()), len(good))
        lines.append(f"{said:34s}{caught:>20s}{false:>14s}{median:>13s}")
    lines += ["", "by rule: first in how many failing runs; told in how many good ones"]
    rules = sorted({rule for found in runs.values() for _, rule in found["told"]})
    for rule in rules:
        first = sum(
            bool(found["told"]) and found["told"][0][1] == rule for found in failed.values()
        )
        wrong = sum(any(told == rule for _, told in found["told"]) for found in good.values())
        lines.append(f"  {rule:36s}{first:4d}{wrong:4d}")
    lines += ["", "leaves at step: " + " ".join(str(found["leaves"]) for found in failed.values())]
    return "\n".join(lines)


def _best(runs: dict[str, dict[str, Any]], name: str) -> np.ndarray:
    """The curve of the rate at which that architecture ends lowest with the same seed, and so the
    same batches.
    """
    architecture, _, seed = name.rsplit("/", 2)
    alike = [
        found
        for other, found in runs.items()
        if other.startswith(f"{architecture}/") and other.endswith(f"/{seed}")
    ]
    curve: np.ndarray = min(alike, key=lambda found: float(found["curve"][-30:].mean()))["curve"]
    return curve


def _share(count: int, of: int) -> str:
    return f"{count}/{of} = {100 * count / max(1, of):.0f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "evaluate"])
    parser.add_argument("--half", choices=[*ARCHITECTURES], default=None)
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the table in benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    halves = [given.half] if given.half else list(ARCHITECTURES)
    if given.what == "evaluate":
        text = "\n\n".join(evaluate(half) for half in halves)
        if given.keep:
            keep(f"warnings-{'-'.join(halves)}", text.splitlines())
        else:
            print(text)
        return
    for half in halves:
        for name in names(half):
            out = OUT / half / name
            if given.only in name and not (out / "steps.json").exists():
                print(f"{half} {name}: {run(half, name, out):.1f} s", flush=True)


if __name__ == "__main__":
    main()
