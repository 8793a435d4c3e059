"""Errors of torch during a training, as ConfigErrors with the fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ctrans.training.settings import TrainConfig
from solvers import ConfigError

COMPILER = ("torch._dynamo", "torch._inductor")
"""The modules of the errors of torch's compiler."""


@contextlib.contextmanager
def explaining(config: TrainConfig, context: int) -> Iterator[None]:
    """Turns lack of memory, on any device, and a compiler's failure into a ConfigError with the
    fix.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has no error type for its CPU allocator, and many for its compiler
        out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if out_of_memory or "can't allocate memory" in str(error):
            raise ConfigError(
                f"out of memory with a batch of {config.batch} sequences and a context of"
                f" {context}: lower --batch and raise --accumulate by as much, use --gradient"
                " checkpoint, or lower --context"
            ) from None
        if type(error).__module__.startswith(COMPILER):
            reason = next(iter(str(error).splitlines()), "it failed")
            raise ConfigError(
                f"cannot compile the model here: {reason}; leave out --compile, or install a C++"
                " compiler"
            ) from None
        raise
