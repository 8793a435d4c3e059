"""Screening a stream of weights of Llama-7B's shape: a few blocks are measured, and all 32 are
extrapolated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.bench.measure import Row

SCRIPT = Path(__file__).resolve().parents[1] / "screening.py"
BLOCKS = 32


def screenings(*, quick: bool) -> list[Row]:
    """A quick screening of 1 and 2 blocks, each a process of its own; in short 1 block, not
    extrapolated.
    """
    if quick:
        found = _measured("llama-7b:1")
        return [
            _row(
                "Llama-7B's shape, 1 block, quick, weights on demand",
                found["seconds"],
                _least(found),
            )
        ]
    one, two = (_measured(f"llama-7b:{blocks}") for blocks in (1, 2))
    rates = {
        rate: max(one[rate], two[rate]) for rate in ("draw_limit", "product_limit")
    }  # of two processes
    each, least = two["seconds"] - one["seconds"], _least(two | rates) - _least(one | rates)
    note = (
        f"extrapolated: {one['seconds']:.1f} s for 1 block and {two['seconds']:.1f} s for 2, so"
        f" {each:.1f} s a block; aim 480 s"
    )
    return [
        _row(
            f"Llama-7B's shape, {BLOCKS} blocks, quick, weights on demand",
            one["seconds"] + (BLOCKS - 1) * each,
            _least(one | rates) + (BLOCKS - 1) * least,
            note,
            estimated=True,
        )
    ]


def _measured(case: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--one", case], check=True, capture_output=True, text=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _least(found: dict[str, float]) -> float:
    """Drawing and products at the rates of this machine when it does nothing else."""
    return found["numbers"] / found["draw_limit"] + found["flops"] / found["product_limit"]


def _row(
    name: str, seconds: float, limit: float, note: str = "", *, estimated: bool = False
) -> Row:
    word = "its weights drawn and its products of 32 tokens, each alone"
    return Row(
        name, seconds, seconds, 1, limit=limit, limit_is=word, note=note, estimated=estimated
    )
