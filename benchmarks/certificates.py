"""The certificates at GPT-2's width: how exactly closed form and ascents agree, and how long one
placement takes.

python benchmarks/certificates.py
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

# in place of this file's own folder, as in the other benchmarks
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.record import keep
from ctrans.control import admissible_set, certify
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS

WIDTH, TOKENS, FEATURES, REPEATS = 768, 128, 3072, 3


def main() -> list[str]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    # costates whose tokens differ by a factor of 1000, as real ones do, and gains and offsets that
    # have learned
    costate = (
        1e-3
        * noise(TOKENS, WIDTH)
        * torch.logspace(-1.5, 1.5, TOKENS, dtype=torch.float64).unsqueeze(-1)
    )
    features = noise(TOKENS, FEATURES)
    lines = [
        (
            f"Width {WIDTH}, {TOKENS} tokens, {FEATURES} features, float64; median seconds of"
            f" {REPEATS}, all certificates of one placement."
        ),
        (
            f"{'norm':10} {'placement':9} {'verdict':11} {'seconds':>7} {'gap':>8} {'W gap':>8}"
            f" {'KKT':>8} {'apart':>8} {'R^k':>9}"
        ),
    ]
    for name, kind in NORMS.items():
        norm = kind(WIDTH).double().requires_grad_(requires_grad=False)
        for parameter in norm.parameters():
            parameter.add_(0.1 * noise(WIDTH))
        state = norm.retract(noise(TOKENS, WIDTH))
        for placement in PLACEMENTS.values():
            given = {"state": state} if placement.state_norm else {}
            seconds = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                found = certify(
                    admissible_set(norm, placement.name, **given), costate, features=features
                )
                seconds.append(time.perf_counter() - start)
            assert found.agrees
            velocities, weights = found.velocities, found.weights
            figures = [
                None if velocities is None else velocities.gap,
                None if weights is None else weights.gap,
                found.kkt,
                None if velocities is None else velocities.uniqueness,
            ]
            cells = " ".join(
                f"{'-' if value is None else format(value, '.1e'):>8}" for value in figures
            )
            exponent = "-" if found.growth is None else f"{found.growth.exponent:.6f}"
            verdict = found.verdict if isinstance(found.verdict, str) else found.verdict.value
            lines.append(
                f"{name:10} {placement.name:9} {verdict:11} {statistics.median(seconds):7.2f}"
                f" {cells} {exponent:>9}"
            )
    return lines


if __name__ == "__main__":
    keep("certificates", main())
