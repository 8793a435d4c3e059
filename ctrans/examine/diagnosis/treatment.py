"""The change of a checkpoint's weights that healed in a trial (benchmarks/clinic/TREATMENT.md)."""

from __future__ import annotations

import math
import statistics

from ctrans.examine.diagnosis.reading import rms
from ctrans.interop.checkpoint_weights import WeightReaders
from ctrans.interop.weight_names import BLOCK, GAIN

TREATED = "sublayer output too large"
"""The finding whose treatment passed the trial."""
PROVED = (
    "healed 12 of 12 (76 to 100%), placebo 0 of 12: small models with one such weight, after 40"
    " more training steps"
)
LARGER = 10.0
"""A weight is too large if its rms is so many times that of the same weight in the other blocks."""


def size_of_neighbours(weights: WeightReaders) -> dict[str, float]:
    """The factors that scale weights whose rms is above `LARGER` times the median rms of the same
    weight in other blocks to that rms. Gains have none.
    """
    sizes: dict[str, dict[str, float]] = {}
    for name, reader in weights.items():
        if BLOCK.search(name) and not GAIN.search(name):
            sizes.setdefault(BLOCK.sub(".", name, count=1), {})[name] = rms(reader())
    factors = {}
    for alike in sizes.values():
        for name, size in alike.items():
            in_other_blocks = [alike[neighbour] for neighbour in alike if neighbour != name]
            if not in_other_blocks:
                continue
            usual = statistics.median(in_other_blocks)
            if 0 < LARGER * usual < size < math.inf:
                factors[name] = usual / size
    return factors
