"""The note *router collapse* in trainings of mixtures of experts: ones that are well, and ones whose
router is forced onto the first experts from a step on.

    python benchmarks/routers.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import numpy as np
import torch

from benchmarks.edit_models import BYTES, TEXT
from benchmarks.record import keep
from ctrans import GPT, GPTConfig
from ctrans.training.monitor import Monitor

STEPS, EVERY, ROWS, CONTEXT, RATE = 400, 10, 8, 32, 3e-3
FORCED_AT = 250
FORCE = 1e3
"""The size of the router's rows of the experts that are chosen, by which all states choose them."""
CHECK = "router collapse"


def training(experts: int, top_k: int, seed: int, *, forced: bool) -> Monitor:
    config = GPTConfig(
        vocab_size=BYTES,
        context=CONTEXT,
        depth=3,
        width=32,
        heads=2,
        ffn="moe",
        experts=experts,
        top_k=top_k,
        placement="pre",
    )
    model = GPT(config, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    generator = torch.Generator().manual_seed(seed)
    routers = [weight for name, weight in model.named_parameters() if "router" in name]
    with Monitor(model, every=EVERY) as monitor:
        for step in range(STEPS):
            if forced and step >= FORCED_AT:
                with torch.no_grad():
                    for weight in routers:
                        weight[1:] = 0.0
                        weight[0] *= FORCE / weight[0].norm()
            places = torch.randint(0, len(TEXT) - CONTEXT - 1, (ROWS,), generator=generator)
            rows = torch.stack([TEXT[place : place + CONTEXT + 1] for place in places.tolist()])
            _, loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            monitor.step(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return monitor


def least_of_past(monitor: Monitor) -> float:
    """The least evenness over the median before it, of two reports one after another."""
    _, values = monitor.past.of("routing")
    values = values[:, ~np.isnan(values).all(0)]
    ratios = np.array([values[i] / np.median(values[: i - 1], 0) for i in range(13, len(values))])
    return float(np.maximum(ratios[1:], ratios[:-1]).min())


def main() -> None:
    torch.set_num_threads(1)
    lines = ["experts  chosen  seed  forced  least of its past  router collapse at step"]
    for experts, top_k in ((4, 2), (8, 2), (16, 3)):
        for seed, forced in ((0, False), (1, False), (2, False), (0, True), (1, True)):
            monitor = training(experts, top_k, seed, forced=forced)
            steps = [alarm.step for alarm in monitor.alarms if alarm.check == CHECK]
            lines.append(
                f"{experts:7}  {top_k:6}  {seed:4}  {'yes' if forced else 'no':6}"
                f"  {least_of_past(monitor):17.2f}  {', '.join(map(str, steps)) or '-'}"
            )
            print(lines[-1], flush=True)
    keep("routers", lines)


if __name__ == "__main__":
    main()
