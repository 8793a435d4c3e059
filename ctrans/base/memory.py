"""How much memory this process may use, and what does not fit."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch

from solvers import ConfigError

SHARE = 4
"""By default weights come on demand if they need more than 1/SHARE of the memory: graphs, gradients
and copies in float64 need the rest.
"""
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a control group, in versions 2 and 1."""


def memory() -> int:
    """The bytes of memory that this process may use: this machine's, or less by the limit of its
    control group or of `ulimit -v`.
    """
    allowed = [
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        resource.getrlimit(resource.RLIMIT_AS)[0],
    ]
    for limit in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            allowed.append(int(limit.read_text()))
    return min(size for size in allowed if size > 0)


def too_large_to_stay(weights: float) -> bool:
    """Whether weights of this size in bytes come on demand by default."""
    return weights * SHARE > memory()


def check_fits(size: int | float, remedy: str, what: str = "the weights need") -> None:
    """Raises ConfigError with the remedy if the size in bytes exceeds this machine's memory."""
    if size <= memory():
        return
    if size < 10**30:
        gigabytes = f"{size / 1e9:.3g}"
    else:
        gigabytes = "over 10^21"
    raise ConfigError(f"{what} {gigabytes} GB and this machine has {memory() / 1e9:.3g}: {remedy}")


def check_matrices_fit(entries: int) -> None:
    """Raises ConfigError if new matrices with so many entries exceed this machine's memory. On
    other devices, such as "meta", they need none of it.
    """
    if torch.get_default_device().type == "cpu":
        size = entries * torch.get_default_dtype().itemsize
        check_fits(size, "lower the width, or the hidden width")
