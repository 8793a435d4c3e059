"""Kan's generalisation radius, and whether it is informative for a hidden state."""

from __future__ import annotations

import dataclasses
import math

from ctrans.dynamics.depth import check_count
from solvers import ConfigError


@dataclasses.dataclass(frozen=True)
class GeneralisationRadius:
    """r(N, delta) = C_bar N^(-1/(nd)) + sqrt(log(1/delta)/N), with C_bar unknown. `verdict` says
    whether it is informative.

    `shrinkage` is N^(-1/(nd)), the radius of N samples relative to that of one.
    `log10_samples_to_halve` is log10 of the 2^(nd) samples that make it 1/2.
    """

    samples: int
    dimension: int
    delta: float
    shrinkage: float
    deviation: float
    log10_samples_to_halve: float
    vacuous: bool
    verdict: str


def generalisation_radius(
    samples: int, tokens: int, width: int, delta: float = 0.05
) -> GeneralisationRadius:
    """Whether N samples bring the empirical measure any nearer to the true one in W_1 (Kan, eq.
    128, after Fournier and Guillin).

    It is vacuous if N < 2^(nd): N samples then do not even halve the radius of one. Raises
    ConfigError for counts below 1 or delta outside (0, 1).
    """
    for name, value in (("samples", samples), ("tokens", tokens), ("width", width)):
        check_count(name, value, most=10**18)  # a large limit: it is only a number here
    if not 0 < delta < 1:
        raise ConfigError(f"delta = {delta!r}: give a probability between 0 and 1, such as 0.05")
    dimension = tokens * width
    shrinkage = math.exp(-math.log(samples) / dimension)
    needed = dimension * math.log10(2)
    vacuous = shrinkage > 0.5
    if samples == 1:
        leave = "1 sample leaves"
    else:
        leave = f"{samples} samples leave"
    if vacuous:
        verdict = (
            f"vacuous: in {dimension} dimensions {leave} {shrinkage:.1%} of the radius of one, and"
            f" halving it takes 10^{needed:.4g} samples"
        )
    else:
        verdict = (
            f"informative up to its unknown constant: {leave} {shrinkage:.1%} of the radius of one"
        )
    return GeneralisationRadius(
        samples,
        dimension,
        delta,
        shrinkage,
        math.sqrt(math.log(1 / delta) / samples),
        needed,
        vacuous,
        verdict,
    )
