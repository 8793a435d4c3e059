"""Code of `torch.jit.script`, whose operations torch does not show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

ORIGINAL = "_torchdynamo_inline"
"""Where torch keeps the Python function of a scripted one."""


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Inside, a scripted function runs as the Python function that it was made of."""
    kind: Any = torch.jit.ScriptFunction
    before = kind.__call__

    def call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(scripted, ORIGINAL, None)
        if function is None:
            return before(scripted, *args, **kwargs)
        return function(*args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = before


def why_scripted(module: nn.Module) -> str:
    """The first scripted module, and what to do about it, in words; "" if there is none."""
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            return (
                f"{path or 'it'} is scripted by torch.jit, which hides its operations: give the"
                " module as it is before torch.jit.script or torch.jit.trace"
            )
    return ""
