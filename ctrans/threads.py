"""Threads on a machine that others use too: how long they wait for one another, and how many a
model needs.

OpenMP's threads, which compute torch's operations, wait by spinning: libgomp's for milliseconds, a
time slice of the system. Beside other busy processes a model of many small operations then waits
for threads that have no processor, a hundred times as long as it computes. Imports nothing but the
standard library, since it has to act before torch is imported.
"""

from __future__ import annotations

import os

WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
"""How threads wait unless the user says. Passive: they sleep, and give their processor away.
libgomp, which torch's wheels for Linux have, is told in turns of a loop: about 0.1 ms, longer than
from one operation to the next, so that a quiet machine loses nothing.
"""
USERS = (*WAITING, "KMP_BLOCKTIME")
"""What a user says it by, in any OpenMP."""
GRAIN = 6e6
"""Floating-point operations in float64 of a block's forward pass that are worth a thread, as
`benchmarks/threads.py` measures.
"""


def wait_passively() -> None:
    """Sets `WAITING` for this process and those it starts, unless the user has set any of `USERS`.
    Only acts before torch is imported.
    """
    if not any(name in os.environ for name in USERS):
        os.environ.update(WAITING)


def flops(width: int, batch: int, context: int) -> float:
    """24 n d^2 + 4 n T d, n = batch T: a block's forward pass over sequences of T tokens of width
    d, its FFN four times as wide.
    """
    return batch * context * (24.0 * width**2 + 4.0 * context * width)


def worth(operations: float, itemsize: int = 8) -> int:
    """1 + flops / grain: how many threads a block of so many operations is worth, where entries
    take `itemsize` bytes (4: float32).
    """
    return 1 + int(operations * itemsize / (8 * GRAIN))


def choose_threads(operations: float, itemsize: int = 8) -> None:
    """Gives torch as many threads as a block of so many operations is worth, and at most those that
    it has.

    A user's OMP_NUM_THREADS wins. The same request on the same machine gets the same number, and so
    the same bits.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), worth(operations, itemsize)))
