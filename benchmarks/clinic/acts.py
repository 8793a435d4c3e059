"""Changes of a checkpoint's weights that treat findings of `diagnose`; the trial of TREATMENT.md tries them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from ctrans.findings import Finding
from ctrans.stability.diagnosis.diagnostic_checks import CHECKS
from ctrans.stability.diagnosis.weights_only import BLOCK, GAIN, WeightReaders

LARGER = 10.0
"""A weight is too large if its rms is so many times that of the same weight in the other blocks."""


@dataclasses.dataclass(frozen=True)
class Act:
    """The new numbers of a weight, and in words what changed."""

    weight: str
    new: Tensor
    words: str


def median_gains(weights: WeightReaders) -> Iterator[Act]:
    """Gains above the limit of *gain too large* get the median |gamma| of their norm."""
    for name, read in weights.items():
        if GAIN.search(name):
            gains = read()
            middle = gains.abs().median()
            odd = gains.abs() > (CHECKS["gain too large"].high or 0.0) * middle
            if middle > 0 and odd.any():
                yield Act(name, torch.where(odd, middle, gains), f"{int(odd.sum())} gains set to the median {float(middle):.3g}")


def size_of_neighbours(weights: WeightReaders) -> Iterator[Act]:
    """A weight whose rms is above `LARGER` times the median rms of the same weight in other blocks gets
    that rms."""
    sizes: dict[str, dict[str, float]] = {}
    for name, read in weights.items():
        if BLOCK.search(name) and not GAIN.search(name):
            kind = BLOCK.sub(".", name, count=1)
            sizes.setdefault(kind, {})[name] = float(read().double().square().mean().sqrt())
    for alike in sizes.values():
        for name, size in alike.items():
            usual = statistics.median([other for own, other in alike.items() if own != name] or [0.0])
            if usual > 0 and size > LARGER * usual:
                yield Act(
                    name, weights[name]() * (usual / size), f"multiplied by {usual / size:.3g}, to the size in other blocks"
                )


TREATMENTS: dict[str, Callable[[WeightReaders], Iterator[Act]]] = {
    "gain too large": median_gains,
    "sublayer output too large": size_of_neighbours,
}
"""By finding: the acts that treat it."""


@torch.no_grad()
def acts_for(findings: Collection[Finding], weights: WeightReaders) -> list[Act]:
    """The acts for these findings. The weights decide the places. Raises nothing for findings without
    a treatment."""
    found = {finding.check for finding in findings}
    return [act for name, treat in TREATMENTS.items() if name in found for act in treat(weights)]
