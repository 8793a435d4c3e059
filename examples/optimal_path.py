"""The trained path and the optimal one, in a state of two channels.

A Transformer of width 2 learns to move the points of two half-moons to two targets. An RMSNorm
behind every map keeps its velocities on an ellipse, so that its control problem is well-posed.
Sweeps of the maximum principle then find the paths that are optimal for velocities which are free
at each point, and ctrans measures how far the trained model is from them, in nats: its optimality
gap, and which segment has most of it.

    python examples/optimal_path.py --out optimal_path.png
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from ctrans.control.least_loss import LeastLoss, least_loss
from ctrans.control.optimal_trajectory import OptimalTrajectory, optimal_trajectory
from ctrans.control.reach import reaches
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import Attention, FeedForward
from ctrans.dynamics.norm import RMSNorm
from ctrans.dynamics.sublayer import Sublayer

BLOCKS, DT, POINTS = 3, 0.08, 64
TARGETS = torch.tensor([[-1.0, 0.2], [1.0, -0.2]], dtype=torch.float64)
COLOURS = ("#004488", "#bb5566")
OPTIMAL = "#009988"


class Mover(nn.Module):
    """Points in the plane, moved by a depth of width 2. The loss is the cross-entropy of a softmax
    over the squared distances to the targets.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sublayers = []
        for _ in range(BLOCKS):
            for kind, field in (
                ("attention", Attention(2, 1, causal=False)),
                ("ffn", FeedForward(2, 32)),
            ):
                sublayers.append(Sublayer(field, kind, output_norm=RMSNorm(2)))
        self.depth = Depth(sublayers, DT)

    def embed(self, points: Tensor) -> Tensor:
        return points

    def head(self, x: Tensor) -> Tensor:
        return -(x.unsqueeze(-2) - TARGETS).square().sum(-1)

    def terminal_loss(self, x: Tensor, moon: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, -2), moon.flatten())


def half_moons() -> tuple[Tensor, Tensor]:
    """The points of two half-moons (1, points, 2), and the moon of each."""
    generator = torch.Generator().manual_seed(1)
    angle = math.pi * torch.rand(POINTS // 2, generator=generator, dtype=torch.float64)
    upper = torch.stack([angle.cos() - 0.5, angle.sin() - 0.25], -1)
    points = torch.cat([upper, -upper])
    points += 0.15 * torch.randn(points.shape, generator=generator, dtype=torch.float64)
    return points.unsqueeze(0), (torch.arange(POINTS) // (POINTS // 2)).unsqueeze(0)


def train(model: Mover, points: Tensor, moon: Tensor, steps: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        model.terminal_loss(model.depth(points), moon).backward()
        optimiser.step()


def path(model: Mover, points: Tensor) -> list[Tensor]:
    """The model's own states, at the start and after each segment."""
    states = [points]
    for sublayer, h in zip(model.depth.sublayers, model.depth.lengths, strict=True):
        states.append(sublayer.step(states[-1], h))
    return states


def draw_paths(axes: Axes, model: Mover, states: list[Tensor], moon: Tensor, title: str) -> None:
    """The paths over the velocity field of the last FFN, with what is within reach of one point."""
    side = torch.linspace(-2.2, 2.2, 19, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    velocity = list(model.depth.sublayers)[-1].velocity(grid)
    axes.quiver(*grid.T, *velocity.T, color="0.8", scale=60, width=0.003, zorder=0)
    paths = torch.stack(states)[:, 0]
    for k, colour in enumerate(COLOURS):
        mine = paths[:, moon[0] == k]
        axes.plot(*mine.unbind(-1), color=colour, linewidth=0.9, alpha=0.7)
        axes.scatter(*mine[0].T, s=10, facecolors="white", edgecolors=colour, zorder=2)
        axes.scatter(*mine[-1].T, s=14, color=colour, zorder=3)
        axes.scatter(*TARGETS[k], marker="*", s=200, color=colour, edgecolors="black", zorder=4)
    angles = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)
    normals = torch.stack([angles.cos(), angles.sin()], -1)
    edge = reaches(model.depth)[0].extreme(states[0][0, :1].expand_as(normals), normals)
    axes.plot(*edge.T, color="black", linestyle="dashed", label="within reach of one point")
    axes.set(title=title, xlabel="channel 1", ylabel="channel 2", aspect="equal")
    axes.set(xlim=(-2.8, 2.8), ylim=(-2.2, 2.2))
    axes.legend(frameon=False, loc="upper left")


def draw_value(axes: Axes, value: LeastLoss, best: OptimalTrajectory) -> None:
    axes.plot(value.times, value.found, "o-", color="black", label="within reach of the model")
    axes.axhline(best.loss, color=OPTIMAL, label="along the optimal path")
    axes.set(
        title=f"Optimality gap: {value.found[-1] - value.found[0]:.3f} nats",
        xlabel="depth-time t",
        ylabel=r"least loss $\Phi(X, t)$, nats",
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def main(arguments: Sequence[str] | None = None) -> OptimalTrajectory:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="optimal_path.png", help="the picture")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    points, moon = half_moons()
    model = Mover().double()
    train(model, points, moon, given.steps)
    model.requires_grad_(requires_grad=False)
    value = least_loss(model, points, moon)
    best = optimal_trajectory(model, points, moon)
    trained = value.found[-1]
    print(f"trained model: {trained:.4f} nats; optimal path: {best.loss:.4f} nats")
    print("segment   kind        optimality gap, nats")
    for k, (sublayer, gap) in enumerate(zip(model.depth.sublayers, value.gaps, strict=True)):
        print(f"{k:<9} {sublayer.kind:<11} {gap:.4f}")
    figure = Figure(figsize=(15, 4.9), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    draw_paths(first, model, path(model, points), moon, f"Trained: {trained:.3f} nats")
    draw_paths(second, model, list(best.states), moon, f"Optimal: {best.loss:.3f} nats")
    draw_value(third, value, best)
    FigureCanvasAgg(figure)
    figure.savefig(given.out, dpi=130)
    return best


if __name__ == "__main__":
    main()
