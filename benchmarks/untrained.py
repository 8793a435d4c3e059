"""Blocks and single matrices that are drawn anew in trained models, as when names of a checkpoint do
not match, and the same models as they are: do *block untrained* and *weight untrained* find the
one, and stay silent over the other?

    python benchmarks/untrained.py [MODEL ..]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()
warnings.simplefilter("ignore")

import torch
from torch import nn

from benchmarks.clinic.judging import share_of
from benchmarks.edit_models import BLOCKS, MODELS, trained
from benchmarks.record import keep
from ctrans.examine.diagnosis.weights_only import weight_diagnosis
from ctrans.interop.weight_names import BLOCK

STEPS = (50, 150, 600, 1200)
"""How long the models were trained."""
NARROWEST = 16
"""The smaller side of a matrix that is examined."""


def named(model: nn.Module, check_name: str) -> dict[str, int | None]:
    """The places that the check names, with their blocks."""
    weights = {name: weight.detach().clone for name, weight in model.named_parameters()}
    diagnosis = weight_diagnosis(weights)
    check = diagnosis.checks[check_name]
    readings = diagnosis.readings[check.quantity]
    return {each.place: each.segment for each in readings if check.fails(each.value)}


def untrained(model: nn.Module) -> set[int]:
    """The blocks that the check names."""
    return {block or 0 for block in named(model, "block untrained").values()}


def with_fresh_weight(name: str, steps: int, weight: str) -> nn.Module:
    model = trained(name, steps)
    torch.manual_seed(17)
    fresh = dict(MODELS[name].make().named_parameters())[weight]
    with torch.no_grad():
        dict(model.named_parameters())[weight].copy_(fresh)
    return model


def single_matrices(name: str, steps: int) -> tuple[int, int, int]:
    """How many matrices of a model as it is are named, how many of those in blocks and of the head
    are found if each is drawn anew, and how many there are.
    """
    model = trained(name, steps)
    of_healthy = len(named(model, "weight untrained"))
    matrices = [
        path
        for path, weight in model.named_parameters()
        if weight.dim() == 2
        and min(weight.shape) >= NARROWEST
        and ("head" in path or BLOCK.search(path))
    ]
    found = 0
    for path in matrices:
        places = named(with_fresh_weight(name, steps, path), "weight untrained")
        found += any(place.endswith(f"the weight {path}") for place in places)
    return of_healthy, found, len(matrices)


def with_fresh_blocks(name: str, steps: int, blocks: Sequence[int]) -> nn.Module:
    model = trained(name, steps)
    torch.manual_seed(17)
    fresh = MODELS[name].make()
    for k in blocks:
        MODELS[name].blocks(model)[k].load_state_dict(MODELS[name].blocks(fresh)[k].state_dict())
    return model


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(MODELS)
    lines = [
        "model    steps  as it is   one block anew    half of the blocks anew   matrices: as they"
        " are, one anew"
    ]
    for steps in STEPS:
        healthy = found = halves = 0
        named_matrices = found_matrices = all_matrices = 0
        for name in names:
            of_healthy = untrained(trained(name, steps))
            ones = [untrained(with_fresh_blocks(name, steps, [k])) == {k} for k in range(BLOCKS)]
            half = set(range(BLOCKS // 2))
            of_half = untrained(with_fresh_blocks(name, steps, sorted(half)))
            healthy += bool(of_healthy)
            found += sum(ones)
            halves += of_half == half
            as_they_are, of_matrices, number = single_matrices(name, steps)
            named_matrices += as_they_are
            found_matrices += of_matrices
            all_matrices += number
            lines.append(
                f"{name:8} {steps:5}  {sorted(of_healthy) or 'none'!s:9}  found {sum(ones)} of"
                f" {BLOCKS}      {'found' if of_half == half else str(sorted(of_half) or 'none')!s:24}"
                f"  {as_they_are or 'none'}, found {of_matrices} of {number}"
            )
            print(lines[-1], flush=True)
        lines.append(
            f"after {steps} steps: named in the models as they are {share_of(healthy, len(names))};"
            f" one block {share_of(found, BLOCKS * len(names))}; half {share_of(halves, len(names))};"
            f" matrices named as they are {share_of(named_matrices, all_matrices)}, one anew"
            f" {share_of(found_matrices, all_matrices)}"
        )
    keep("untrained", lines)


if __name__ == "__main__":
    main()
