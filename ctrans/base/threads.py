"""Threads on a busy machine: how long they wait for one another, and how many a model needs.

OpenMP's threads, which run torch's operations, wait by spinning; those of libgomp for milliseconds,
a time slice of the system. On a machine with other busy processes a model of many small operations
waits for threads without a processor, up to a hundred times its computing time. This module imports
only the standard library, because it must run before torch is imported.
"""

from __future__ import annotations

import os

WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""Settings that make threads sleep soon and give their processor away. libgomp, in torch's wheels
for Linux, counts turns of a loop: these take about 0.5 ms. A fifth of it made models take up to 1.5
times as long on a quiet machine. Longer waiting costs beside busy processes.
"""
USERS = (*WAITING, "KMP_BLOCKTIME")
"""Variables by which a user sets the waiting of any OpenMP."""
GRAIN = 6e6
"""The number of float64 operations in a block's forward pass that is worth one more thread
(`benchmarks/threads.py` measures it).
"""


def wait_passively() -> None:
    """Sets `WAITING` for this process and its children, unless the user has set any of `USERS`.
    Works only before torch is imported.
    """
    if not any(name in os.environ for name in USERS):
        os.environ.update(WAITING)


def flops(width: int, batch: int, context: int) -> float:
    """24 n d^2 + 4 n T d, n = batch T: the operations of a block's forward pass over sequences of T
    tokens of width d, with an FFN four times as wide.
    """
    return batch * context * (24.0 * width**2 + 4.0 * context * width)


def worth(operations: float, itemsize: int) -> int:
    """1 + flops / GRAIN: the number of threads for a block of so many operations; `itemsize` is the
    size of an entry in bytes (4: float32).
    """
    return 1 + int(operations * itemsize / (8 * GRAIN))


def choose_threads(operations: float, itemsize: int = 8) -> None:
    """Sets torch's number of threads to `worth`, but not above the present number.

    The environment variable OMP_NUM_THREADS overrides it. The same request on the same machine gets
    the same number, and so the same bits.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), worth(operations, itemsize)))
