"""Changes of a checkpoint's weights that treat findings of `diagnose`; the trial of TREATMENT.md
tries them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.examine.diagnosis.treatment import TREATED, size_of_neighbours
from ctrans.interop.checkpoint_weights import WeightReaders
from ctrans.interop.weight_names import GAIN
from ctrans.measure.findings import Finding


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
                yield Act(
                    name,
                    torch.where(odd, middle, gains),
                    f"{int(odd.sum())} gains set to the median {float(middle):.3g}",
                )


def scaled(weights: WeightReaders) -> Iterator[Act]:
    """What `ctrans diagnose --treat` does."""
    for name, factor in size_of_neighbours(weights).items():
        yield Act(
            name,
            weights[name]() * factor,
            f"multiplied by {factor:.3g}, to the size in other blocks",
        )


TREATMENTS: dict[str, Callable[[WeightReaders], Iterator[Act]]] = {
    "gain too large": median_gains,
    TREATED: scaled,
}
"""By finding: the acts that treat it."""


@torch.no_grad()
def acts_for(findings: Collection[Finding], weights: WeightReaders) -> list[Act]:
    """The acts for these findings. The weights decide the places. Raises nothing for findings
    without a treatment.
    """
    found = {finding.check for finding in findings}
    return [act for name, treat in TREATMENTS.items() if name in found for act in treat(weights)]
