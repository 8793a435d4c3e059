"""The user's own module within what torch made of it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

WRAPPERS = (DataParallel, DistributedDataParallel)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of torch.compile, DataParallel and DistributedDataParallel."""
    while True:
        inner = module.module if isinstance(module, WRAPPERS) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner
