"""Training steps next to nanoGPT's, if a checkout is given, and next to a plain PyTorch loop;
populations next to members alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import populations as population_benchmark
from benchmarks import training
from benchmarks.bench import plain_gpt
from benchmarks.bench.measure import (
    PRODUCTS,
    Row,
    Sample,
    Work,
    pairs,
    products_alone,
    row_of_pairs,
)

COMPARED = 20
"""Steps whose losses are compared first."""


def train(*, quick: bool) -> list[Row]:
    """Times of an iteration: with equal batches, their ratio is that of tokens a second, upside
    down.
    """
    cases = [("small", False)] if quick else [(size, False) for size in training.SIZES]
    if not quick and shutil.which(os.environ.get("CXX", "g++")):
        cases.append(("medium", True))
    return [
        row
        for size, compiled in cases
        for row in _one(size, 10 if quick else 30, compiled=compiled)
    ]


def _one(size: str, rounds: int, *, compiled: bool) -> list[Row]:
    case = training.case(size, compiled=compiled)
    data = training.from_text(training.default_text(), case.model.context)
    checkout = os.environ.get("NANOGPT")
    peers = {
        "a plain PyTorch loop": plain_gpt,
        **({"nanoGPT": training.load(Path(checkout))} if checkout else {}),
    }
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name, module in peers.items():
            run = training.ours(case, data, Path(directory, name.replace(" ", "-")))
            own = training.our_iteration(run)
            their = training.their_iteration(*training.nanogpt(module, case, run.model), case, data)
            gap = max(abs(own(step) - their(step)) for step in range(COMPARED))
            limit = None if compiled else products_alone(lambda own=own: own(COMPARED))
            found = pairs(_counting(own), _counting(their), rounds)
            rows.append(
                row_of_pairs(
                    f"training step: {case.title}",
                    name,
                    found,
                    limit=limit,
                    limit_is=PRODUCTS,
                    aim=1 / 1.15,
                )
            )
            tokens = case.train.batch * case.model.context / rows[-1].seconds
            note = (
                f"{tokens:,.0f} tokens a second; losses of {COMPARED} steps differ by at most"
                f" {gap:.0e}"
            )
            rows[-1] = dataclasses.replace(rows[-1], note=note)
    return rows


def _counting(iterate: Callable[[int], float]) -> Work:
    steps = itertools.count(COMPARED + 1)
    return lambda: iterate(next(steps))


def populations(*, quick: bool) -> list[Row]:
    """A member's step in a population of 16 next to its step alone, on one thread."""
    warnings.simplefilter("ignore")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _population(*case, 3 if quick else 5)
            for case in ([(4, 2, 32)] if quick else [(8, 1, 16), (8, 4, 32), (8, 8, 64)])
        ]
    finally:
        torch.set_num_threads(threads)


def _population(blocks: int, batch: int, context: int, rounds: int) -> Row:
    found = population_benchmark.samples(blocks, batch, context, rounds)
    together = [(Sample(b, b), Sample(a, a)) for a, b in found]
    name = (
        f"population of 16, {blocks} blocks, {batch} x {context} tokens, width 64: a member's step"
    )
    return row_of_pairs(
        name, "the same run alone", together, aim=1 / 3, note="both by the clock on the wall"
    )
