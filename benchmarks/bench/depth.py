"""Euler over a hand-written loop, and the kinds of gradients over plain backprop."""

from __future__ import annotations

import torch

from benchmarks.bench.measure import PRODUCTS, Row, pairs, products_alone, row_of_pairs
from benchmarks.gradients import deep_steps
from benchmarks.solvers import euler_loops


@torch.no_grad()
def euler(*, quick: bool) -> list[Row]:
    """12 blocks of width 128."""
    loops = euler_loops()
    limit = {"limit": products_alone(loops["hand loop"]), "limit_is": PRODUCTS}
    rounds = 10 if quick else 60
    own = loops["solvers euler"]
    return [
        row_of_pairs(
            f"Euler, 12 blocks, against {name}",
            name,
            pairs(own, loops[name], rounds),
            **limit,
            aim=1.0,
        )
        for name in ("hand loop", "torchdiffeq euler")
    ]


def gradients(*, quick: bool) -> list[Row]:
    """Forward and backward through 48 blocks of width 256; in short 48 of width 64."""
    width = 64 if quick else 256
    steps = deep_steps(width=width)
    plain = steps.pop("hand loop")
    limit = {"limit": products_alone(plain), "limit_is": "products of backprop alone"}
    aims = {"backprop": 1.0, "checkpoint": 1.25}
    return [
        row_of_pairs(
            f"gradient {kind!r}, 48 blocks, width {width}",
            "hand loop and backprop",
            pairs(step, plain, 5 if quick else 10),
            **limit,
            aim=aims.get(kind),
            note="the textbook's ratio is 4/3" if kind == "checkpoint" else "",
        )
        for kind, step in steps.items()
    ]
