"""Steer a cloud of points to two targets, with Pre-LN and with Peri-LN, and measure how fast the
models move the points.

Each point of two overlapping half-moons should end nearer to its own moon's target than to the
other. The loss is the cross-entropy of a softmax over squared distances, as in the head of a
language model. Depth is continuous: two blocks of attention and FFN, solved by Runge-Kutta. Adam
trains on the whole cloud, without weight decay. Both models start from the same weights and have
the same number of them. The norms' gains stay at 1, so Peri-LN's ellipsoid is the sphere |v| =
sqrt(d).

No finite speed is best, because a faster velocity separates the moons better. Pre-LN's velocities
are free, its Hamiltonian is +inf, and training makes them larger. Behind an output norm they cannot
leave the sphere. How large they become depends on the loss. With the squared distance, which a
finite speed can bring to zero, Pre-LN's maximum reaches 10. Here it is 21 or more.

The points have 8 dimensions, of which 2 are drawn. In the plane, LayerNorm has only two values, and
an input norm loses the length of a token. In 8 dimensions a constant third coordinate keeps the
length in the direction.

    python examples/steer_points.py --out steer_points.png
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import Attention, FeedForward
from ctrans.dynamics.norm import LayerNorm
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from solvers import Solution, solve

WIDTH, BLOCKS, DT, POINTS = 8, 2, 0.5, 96
TARGETS = torch.tensor([[-0.5, 0.0], [0.5, 0.0]])
COLOURS = {"Pre-LN": PLACEMENTS["pre"].colour, "Peri-LN": PLACEMENTS["peri"].colour}
MOONS = ("#004488", "#bb5566")


def half_moons(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points in the plane, and the moon of each."""
    angle = math.pi * torch.rand(POINTS // 2, generator=generator)
    upper = torch.stack([angle.cos() - 0.5, angle.sin() - 0.25], -1)
    moons = torch.cat([upper, -upper])
    return moons + 0.25 * torch.randn(moons.shape, generator=generator), torch.arange(POINTS) // (
        POINTS // 2
    )


def make_depth(seed: int, *, output_norm: bool) -> Depth:
    torch.manual_seed(seed)
    fields = {
        "attention": lambda: Attention(WIDTH, 2, causal=False),
        "ffn": lambda: FeedForward(WIDTH, 32),
    }
    return Depth(
        [
            Sublayer(
                make(),
                kind,
                input_norm=fixed_norm(),
                output_norm=fixed_norm() if output_norm else None,
            )
            for _ in range(BLOCKS)
            for kind, make in fields.items()
        ],
        DT,
    )


def fixed_norm() -> LayerNorm:
    return LayerNorm(WIDTH, bias=False).requires_grad_(requires_grad=False)


def flow(depth: Depth, x: Tensor, save: str = "segments") -> Solution:
    return solve(depth.segments(), x, method="rk4", steps=2, save=save)


def train(
    depth: Depth, x: Tensor, plane: Tensor, moon: Tensor, steps: int
) -> list[tuple[float, float, float]]:
    """Loss, mean |v| and max |v| of every training step; |v| over all points at the start of every
    segment.
    """
    optimiser = torch.optim.Adam([p for p in depth.parameters() if p.requires_grad], lr=1e-2)
    history = []
    for _ in range(steps):
        states = flow(depth, x).states
        distances = (states[-1] @ plane).unsqueeze(1) - TARGETS
        loss = F.cross_entropy(-distances.square().sum(-1) / 2, moon)
        with torch.no_grad():
            speed = torch.stack(
                [s.velocity(y).norm(dim=-1) for s, y in zip(depth.sublayers, states, strict=False)]
            )
        history.append((loss.item(), speed.mean().item(), speed.max().item()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return history


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", default="steer_points.png", help="the picture (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=800, help="training steps, at least 1 (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of cloud and weights (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: give at least 1")
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    generator = torch.Generator().manual_seed(arguments.seed)
    points, moon = half_moons(generator)
    # an orthonormal frame across the mean, which LayerNorm removes: two directions for the plane,
    # one for the constant
    frame = torch.linalg.qr(
        torch.cat([torch.ones(WIDTH, 1), torch.randn(WIDTH, 3, generator=generator)], 1)
    ).Q[:, 1:]
    plane, x = frame[:, :2], torch.cat([points, torch.ones(POINTS, 1)], 1) @ frame.T

    figure = Figure(figsize=(14, 4.6), layout="constrained")
    *clouds, speeds = figure.subplots(1, 3)
    clouds[1].sharex(clouds[0])
    clouds[1].sharey(clouds[0])
    for axes, (name, colour) in zip(clouds, COLOURS.items(), strict=True):
        depth = make_depth(arguments.seed, output_norm=name == "Peri-LN")
        history = train(depth, x, plane, moon, arguments.steps)
        loss, mean, largest = history[-1]
        count = sum(p.numel() for p in depth.parameters() if p.requires_grad)
        print(
            f"{name:8} {count} parameters, {arguments.steps} steps: loss {history[0][0]:.3f} to"
            f" {loss:.3f}, |v| mean {history[0][1]:.2f} to {mean:.2f}, max {history[0][2]:.2f} to"
            f" {largest:.2f}"
        )
        with torch.no_grad():
            draw_cloud(axes, torch.stack(flow(depth, x, "steps").states) @ plane, moon)
        axes.set_title(f"{name}: loss {loss:.2f}, $|v|$ up to {largest:.1f}")
        speeds.plot([row[2] for row in history], color=colour, label=f"{name}, max")
        speeds.plot([row[1] for row in history], color=colour, linestyle=":", label=f"{name}, mean")
    speeds.axhline(
        math.sqrt(WIDTH),
        color="0.6",
        linewidth=6,
        alpha=0.4,
        zorder=0,
        label=r"Peri-LN's sphere, $\sqrt{d}$",
    )
    speeds.set(
        title="velocity of the points",
        xlabel="training step",
        ylabel="$|v|$, mean and largest over all points",
        yscale="log",
    )
    speeds.legend(frameon=False)
    speeds.grid(alpha=0.25, which="both")
    FigureCanvasAgg(figure)
    figure.savefig(arguments.out, dpi=130)


def draw_cloud(axes, paths: Tensor, moon: Tensor) -> None:
    """Draws the path of each point through depth, its start hollow and its end full, with the
    targets and the regions nearer to each.
    """
    far = 1.1 * paths.abs().amax((0, 1))
    x, y = (
        max(far[0], axes.get_xlim()[1]),
        max(far[1], axes.get_ylim()[1]),
    )  # the panels share their axes
    axes.set(
        xlabel="first coordinate of a point, $x_1$",
        ylabel="second, $x_2$",
        xlim=(-x, x),
        ylim=(-y, y),
    )
    for k, (colour, side) in enumerate(zip(MOONS, (-1e3, 1e3), strict=True)):
        mine = paths[:, moon == k]
        axes.axvspan(0, side, color=colour, alpha=0.06, linewidth=0)
        axes.plot(*mine.unbind(-1), color=colour, linewidth=0.5, alpha=0.4)
        axes.scatter(
            *mine[0].T, s=11, facecolors="white", edgecolors=colour, linewidths=0.8, zorder=2
        )
        axes.scatter(*mine[-1].T, s=14, color=colour, zorder=3)
        axes.scatter(*TARGETS[k], marker="*", s=170, color=colour, edgecolors="black", zorder=4)


if __name__ == "__main__":
    main()
