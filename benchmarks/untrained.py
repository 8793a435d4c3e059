"""Blocks that are drawn anew in trained models, as when names of a checkpoint do not match, and the
same models as they are: does *block untrained* find the one, and stay silent over the other?

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

STEPS = (50, 150, 600, 1200)
"""How long the models were trained."""
CHECK = "block untrained"


def untrained(model: nn.Module) -> set[int]:
    """The blocks that the check names."""
    weights = {name: weight.detach().clone for name, weight in model.named_parameters()}
    diagnosis = weight_diagnosis(weights)
    check = diagnosis.checks[CHECK]
    readings = diagnosis.readings[check.quantity]
    return {int(each.segment or 0) for each in readings if check.fails(each.value)}


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
    lines = ["model    steps  as it is   one block anew    half of the blocks anew"]
    for steps in STEPS:
        healthy = found = halves = 0
        for name in names:
            of_healthy = untrained(trained(name, steps))
            ones = [untrained(with_fresh_blocks(name, steps, [k])) == {k} for k in range(BLOCKS)]
            half = set(range(BLOCKS // 2))
            of_half = untrained(with_fresh_blocks(name, steps, sorted(half)))
            healthy += bool(of_healthy)
            found += sum(ones)
            halves += of_half == half
            lines.append(
                f"{name:8} {steps:5}  {sorted(of_healthy) or 'none'!s:9}  found {sum(ones)} of"
                f" {BLOCKS}      {'found' if of_half == half else sorted(of_half) or 'none'}"
            )
            print(lines[-1], flush=True)
        lines.append(
            f"after {steps} steps: named in the models as they are {share_of(healthy, len(names))};"
            f" one block {share_of(found, BLOCKS * len(names))}; half {share_of(halves, len(names))}"
        )
    keep("untrained", lines)


if __name__ == "__main__":
    main()
