"""What this machine can do: products at the shapes in question, memory, random numbers."""

from __future__ import annotations

import torch

from benchmarks.bench.measure import Row, Sample, best, row_alone

SHAPES = {
    "large": (1024, 1024, 1024),
    "a training's FFN, width 128": (768, 128, 512),
    "a training's FFN, width 256": (1024, 256, 1024),
    "32 tokens, width 4,096": (32, 4096, 4096),
    "1 token, width 4,096": (1, 4096, 4096),
}
"""Rows, inner size and columns of a product."""


def peaks(*, quick: bool) -> list[Row]:
    """Each with its rate in the note; `limit` is the time at the rate of the large product, or of
    memory.
    """
    rows = []
    rate = 0.0
    for name, (n, k, m) in SHAPES.items():
        a, b = torch.randn(n, k), torch.randn(m, k)
        seconds = best(lambda a=a, b=b: torch.mm(a, b.T), 3 if quick else 10)
        rate = rate or 2 * n * k * m / seconds
        note = (
            f"{2 * n * k * m / seconds / 1e9:.0f} Gflop/s,"
            f" {4 * (n * k + k * m + n * m) / seconds / 1e9:.1f} GB/s"
        )
        rows.append(
            _row(
                f"product {n} x {k} x {m} ({name})",
                seconds,
                limit=2 * n * k * m / rate,
                limit_is="the large product's rate",
                note=note,
            )
        )
    count = 2**24 if quick else 2**26
    source, target = torch.ones(count), torch.empty(count)
    seconds = best(lambda: target.copy_(source), 3 if quick else 5)
    rows.append(
        _row(
            f"copy of {count * 4 // 2**20} MiB",
            seconds,
            note=f"{8 * count / seconds / 1e9:.1f} GB/s read and written",
        )
    )
    seconds = best(lambda: target[: 2**22].normal_(), 3)
    rows.append(
        _row(
            "4 million normal numbers",
            seconds,
            note=f"{2**22 / seconds / 1e6:.0f} million numbers a second",
        )
    )
    return rows


def bandwidth(device: str = "cpu") -> float:
    """Bytes a second that a copy larger than the caches reads and writes."""
    source, target = torch.ones(2**26, device=device), torch.empty(2**26, device=device)
    return 8 * 2**26 / best(lambda: target.copy_(source), 3)


def _row(name: str, seconds: float, **more: object) -> Row:
    return row_alone(name, [Sample(seconds, seconds)], **more)
