"""Does `ctrans.compare` name the part where two models part, and call a harmless pair rounding?

    python benchmarks/parting.py open
    python benchmarks/parting.py sealed

Written down before the first run of the sealed half: a change counts as named if the first part
that changed is the true one (`part` of its case), and its category if the stage, its relation or a
weight's relation is among `causes`. A harmless pair must have no part that changed. Beside it what
people do: the first part behind which the states (of the head: the logits) differ by more than 1e-3
or 1e-2, each model on its own. Later added: whether an edit of the first model explains the part,
with the edit, which a reader may judge. The sealed half are the cases whose name has an odd hash.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch

import ctrans
from benchmarks.clinic.judging import wilson
from benchmarks.parting_cases import CASES, Case
from benchmarks.parting_models import inputs
from benchmarks.record import keep
from ctrans.examine.comparison.compare import compare
from ctrans.examine.comparison.model_comparison import ModelComparison
from solvers import ConfigError, SolveError

RIVALS = (1e-3, 1e-2)
logging.getLogger("transformers").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


def is_sealed(case: Case) -> bool:
    name = f"{case.category}/{case.family}/{case.name}"
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


def classified(output: Any, classes: Any) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    return torch.nn.functional.cross_entropy(logits.float(), classes)


def opened(case: Case, model: torch.nn.Module, x: torch.Tensor) -> Any:
    loss: Any = {"vit": classified, "bert": "mlm"}.get(case.family, "next")
    dtype = next(model.parameters()).dtype
    example = x.to(dtype) if x.is_floating_point() else x
    return ctrans.open_model(model, example=example, loss=loss)


def compared(case: Case) -> ModelComparison | str:
    """The comparison, or why there is none."""
    first, second = case.pair()
    x = inputs(case.family)
    try:
        a = opened(case, first, x)
        b = opened(case, second, x)
        if case.family == "vit":
            tokens, targets = x, torch.arange(len(x))
        else:
            tokens, targets = a.pairs(x)
        return compare(a, b, tokens, targets)
    except (ConfigError, SolveError) as error:
        return str(error)


def by_threshold(found: ModelComparison, limit: float) -> str:
    """The first part behind which states differ by more, as people look for it."""
    for part in found.parts:
        if part.behind > limit:
            return part.name
    return ""


def causes_of(found: ModelComparison) -> set[str]:
    """The names under which the cause was said."""
    names: set[str] = set()
    changed = {part.name for part in found.changed[:1]}
    if found.stage is not None:
        names |= {found.stage.name, found.stage.kind}
    for weight in found.weights:
        if weight.part in changed or (not weight.part and changed & {"the embedding", "the head"}):
            names.add(weight.kind)
    if not found.changed:
        names |= {weight.kind for weight in found.weights}
    return names


def main(half: str) -> None:
    cases = [case for case in CASES if is_sealed(case) == (half == "sealed")]
    lines = [f"{half} half, {len(cases)} pairs"]
    counts: dict[str, list[bool]] = {}

    def count(name: str, *, right: bool) -> None:
        counts.setdefault(name, []).append(right)

    for case in cases:
        begun = time.perf_counter()
        found = compared(case)
        seconds = time.perf_counter() - begun
        label = f"{case.category}, {case.family}, {case.name}"
        if isinstance(found, str):
            refused = bool(case.part) and any(cause in found for cause in case.causes)
            kind = "change: first part" if case.part else "harmless: called rounding"
            count(kind, right=refused)
            if case.part:
                count("change: category", right=refused)
            lines.append(f"{'ok  ' if refused else 'MISS'} {label}: refused: {found[:150]}")
            continue
        named = found.changed[0].name if found.changed else ""
        sum_of_shares = sum(part.share for part in found.parts)
        exact = abs(sum_of_shares - found.difference) <= 1e-6 * max(1.0, abs(found.losses[0]))
        count("shares add up", right=exact)
        causes = causes_of(found)
        ratio = max(part.ratio for part in found.parts)
        if case.part:
            is_named = named == case.part
            if case.causes == ("rounded",):
                # rounding of a weight is said, and explains the part
                is_named = any(w.part == case.part and w.kind == "rounded" for w in found.weights)
            is_caused = bool(causes & set(case.causes))
            count("change: first part", right=is_named)
            count("change: category", right=is_named and is_caused)
            if found.changed:
                count("change: explained by an edit", right=bool(found.explanations))
            for limit in RIVALS:
                count(
                    f"change: first part, threshold {limit:g}",
                    right=by_threshold(found, limit) == case.part,
                )
            mark = "ok  " if is_named and is_caused else "MISS"
            said = f"{named}; {', '.join(sorted(filter(None, causes)))}"
            if found.explanations:
                said += f"; {found.explanations[0]}"
        else:
            count("harmless: called rounding", right=not named)
            for limit in RIVALS:
                count(
                    f"harmless: called rounding, threshold {limit:g}",
                    right=not by_threshold(found, limit),
                )
            mark = "ok  " if not named else "MISS"
            said = named
        lines.append(f"{mark} {label}: {said} (ratio {ratio:.3g}, {seconds:.1f} s)")
        print(lines[-1], flush=True)
    lines.append("")
    for name, results in sorted(counts.items()):
        low, high = wilson(sum(results), len(results))
        lines.append(f"{name}: {sum(results)} of {len(results)} ({low:.0%} to {high:.0%})")
    keep(f"parting-{half}", lines)


if __name__ == "__main__":
    main(sys.argv[1])
