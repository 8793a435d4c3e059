"""The figure of the README: well-posed against degenerate control, on two trained models.

Two small GPTs learn to recall values of keys, one with the norms before the maps (pre), one with
norms behind them too (peri). The panels show

- the hidden states by depth, with the bounds of theory
- how fast the best output of one layer could lower the loss, against a bound on its weights: it
  levels off (well-posed) or grows for ever (degenerate)
- the least loss that is still within reach along the depth: it rises (well-posed) or stays at the
  least of all states until the end (degenerate)
- the distance of the GPT from its ODE with more Euler steps: slope 1, and the first point is the
  GPT itself

    python examples/figure.py --out figure.png
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from ctrans import GPT, GPTConfig
from ctrans.control.certificate import Growth
from ctrans.control.least_loss import LeastLoss, least_loss
from ctrans.control.model_check import ModelCheck, check_model
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.forward.simulation import Simulation, simulate
from ctrans.training.depth_tasks import recall
from ctrans.training.rows import Labelled

SHOWN = ("pre", "peri")
ROWS = 16
CHECKED = 2


@dataclass(frozen=True)
class Trained:
    """A trained model and what the panels show of it."""

    simulation: Simulation
    check: ModelCheck
    value: LeastLoss


def trained(placement: str, data: Labelled, steps: int) -> GPT:
    config = GPTConfig(
        vocab_size=16, context=15, depth=4, width=32, heads=2, placement=placement, dt=0.2
    )
    model = GPT(config, seed=0)
    optimiser = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 5e-3 * min(1.0, step / 30) * (1 - step / steps)
        optimiser.zero_grad()
        _, loss = model(*data.batch(step, 0, batch=32, seed=0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model.double().requires_grad_(requires_grad=False).eval()


def examined(model: GPT, tokens: Tensor, targets: Tensor) -> Trained:
    return Trained(
        simulate(model, tokens),
        check_model(model, tokens[:CHECKED], targets[:CHECKED]),
        least_loss(model, tokens, targets),
    )


def style(name: str) -> dict[str, str]:
    return {"color": PLACEMENTS[name].colour, "marker": PLACEMENTS[name].marker}


def draw_states(axes: Axes, models: dict[str, Trained]) -> None:
    for name, model in models.items():
        simulation = model.simulation
        axes.plot(simulation.times, simulation.mean_abs, label=name, **style(name))
        if simulation.bounds is not None:
            bound = simulation.bounds.mean_abs
            axes.plot(simulation.times, bound, color=style(name)["color"], linestyle="dashed")
    axes.plot([], [], color="0.4", linestyle="dashed", label="bound of theory")
    axes.set(xlabel="depth-time t", ylabel="mean |x|", yscale="log")
    axes.set_title("Hidden states stay below the bounds of theory")


def draw_growth(axes: Axes, models: dict[str, Trained]) -> None:
    for name, model in models.items():
        growth = model.check.largest.certificate.growth
        assert isinstance(growth, Growth), "hjb-check climbs on every segment"
        middle = math.sqrt(growth.radii[0] * growth.radii[-1])
        radii = [radius / middle for radius in growth.radii]
        axes.plot(radii, growth.values, label=name, **style(name))
    axes.set(xlabel="bound on the last matrix, R/R$_0$", ylabel="best rate, nats per depth-time")
    axes.set(xscale="log", yscale="log")
    axes.set_title("Peri: well-posed. Pre: degenerate, more weight is always better")


def draw_value(axes: Axes, models: dict[str, Trained]) -> None:
    for name, model in models.items():
        axes.plot(model.value.times, model.value.found, label=name, **style(name))
    axes.set(xlabel="depth-time t", ylabel="least loss found within reach, nats", yscale="log")
    axes.set_title("What free velocities could still reach from the model's state")


def draw_euler(axes: Axes, models: dict[str, Trained]) -> None:
    first_points = set()
    for name, model in models.items():
        limit = model.simulation.euler_limit
        assert limit is not None, "the reference was solved"
        label = f"{name}: fitted order {limit.slope:.2f}"
        axes.plot(limit.steps, limit.errors, label=label, **style(name))
        first_points.add(limit.first_point)
    axes.axvline(1, color="0.6", linestyle="dotted", label=f"n = 1: {', '.join(first_points)}")
    axes.set(xlabel="Euler steps a sublayer", ylabel=r"|X$_n$ − X$_{ODE}$| / |X$_{ODE}$|")
    axes.set(xscale="log", yscale="log")
    steps = [1, 2, 4, 8, 16]
    axes.set_xticks(steps, [str(n) for n in steps], minor=False)
    axes.minorticks_off()
    axes.set_title("The Transformer is the Euler solution with one step a sublayer")


def main(arguments: Sequence[str] | None = None) -> dict[str, Trained]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="figure.png", help="the picture")
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    given = parser.parse_args(arguments)
    data = recall()
    tokens, targets = data.validation_windows(ROWS)
    models = {}
    for name in SHOWN:
        models[name] = examined(trained(name, data, given.steps), tokens, targets)
        found = models[name].value.found
        print(
            f"{name}: loss {found[-1]:.3f} nats, least within reach at the start {found[0]:.4f}"
            f" (proven: {models[name].value.proven[0]:.4f}), verdict {models[name].check.verdict}"
        )
    figure = Figure(figsize=(12, 8), layout="constrained")
    draws = (draw_states, draw_growth, draw_value, draw_euler)
    for axes, draw, letter in zip(figure.subplots(2, 2).flat, draws, "abcd", strict=True):
        draw(axes, models)
        axes.set_title(f"({letter}) {axes.get_title()}", fontsize=10)
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
    FigureCanvasAgg(figure)
    figure.savefig(given.out, dpi=120)
    return models


if __name__ == "__main__":
    main()
