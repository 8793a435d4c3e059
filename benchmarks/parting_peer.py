"""The pairs of benchmarks/parting.py beside torchlens, which compares every operation of two passes.

    pip install torchlens==2.36.1
    python benchmarks/parting_peer.py open
    python benchmarks/parting_peer.py sealed

A change counts as named if the first operation that differs is in the block of the true part, or
outside of the blocks in a module that is named like an embedding or a head. That is easier than what
parting.py asks of ctrans, which must name the attention or the FFN. A harmless pair must have no
operation that differs. Tolerances are torchlens' own, and two wider ones.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.clinic.judging import wilson
from benchmarks.parting import is_sealed
from benchmarks.parting_cases import CASES, Case
from benchmarks.parting_models import inputs
from benchmarks.record import keep

TOLERANCES = ((1e-5, 1e-8), (1e-3, 1e-4), (1e-2, 1e-3))
"""Relative and absolute."""
OUTSIDE = {"the embedding": "emb|wte|wpe", "the head": "head|norm|cls|ln_f|decoder"}
"""Names of modules outside of the blocks, by part."""
logging.disable(logging.ERROR)
warnings.simplefilter("ignore")


def traces(case: Case) -> tuple[Any, Any]:
    import torchlens

    first, second = case.pair()
    x = inputs(case.family)
    like = x.to(next(second.parameters()).dtype) if x.is_floating_point() else x
    with torch.no_grad():
        return torchlens.trace(first, x), torchlens.trace(second, like)


def is_in_part(operation: Any, part: str) -> bool:
    """Whether the modules of an operation are those of the part."""
    modules = " ".join(map(str, getattr(operation, "modules", None) or ()))
    blocks = re.findall(r"\.(\d+)(?=[.:\s]|$)", modules)
    wanted = re.match(r"block (\d+)", part)
    if wanted is not None:
        return blocks[:1] == [wanted[1]]
    return not blocks and re.search(OUTSIDE[part], modules) is not None


def main(half: str) -> None:
    from torchlens.debug import first_divergence

    right: Counter[tuple[str, tuple[float, float]]] = Counter()
    total: Counter[str] = Counter()
    for case in CASES:
        if is_sealed(case) != (half == "sealed"):
            continue
        kind = "change: block named" if case.part else "harmless: nothing differs"
        total[kind] += 1
        first, second = traces(case)
        for tolerance in TOLERANCES:
            relative, absolute = tolerance
            row = first_divergence(first, second, rtol=relative, atol=absolute)
            if row is None:
                right[kind, tolerance] += not case.part
            elif case.part:
                owner = second if row["status"] == "only-b" else first
                right[kind, tolerance] += is_in_part(owner[row["op"]], case.part)
    lines = [f"{half} half, torchlens 2.36.1"]
    for kind, count in sorted(total.items()):
        for tolerance in TOLERANCES:
            low, high = wilson(right[kind, tolerance], count)
            lines.append(
                f"{kind}, rtol {tolerance[0]:g}, atol {tolerance[1]:g}: {right[kind, tolerance]} of"
                f" {count} ({low:.0%} to {high:.0%})"
            )
    keep(f"parting-peer-{half}", lines)


if __name__ == "__main__":
    main(sys.argv[1])
