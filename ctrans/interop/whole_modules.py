"""Which modules are one operation each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ctrans.interop.module_chain import is_linear
from ctrans.interop.norms import as_norm


def whole_modules(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of which a call is one operation, by path: linear maps, norms and tables."""
    whole: dict[nn.Module, str] = {}
    for path, part in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in whole.values())
        is_whole = is_linear(part) or type(part) is nn.Embedding
        if path and not inside and (is_whole or _is_norm(part)):
            whole[part] = path
    return whole


def _is_norm(part: nn.Module) -> bool:
    has_parts = next(part.children(), None) is not None
    return not has_parts and as_norm(part) is not None


@contextmanager
def leaving_out_several(whole: dict[nn.Module, str]) -> Iterator[None]:
    """Behind a pass inside of it, modules that return more than one tensor are not among these any
    more: a norm that also returns the state that it got.
    """
    several: list[nn.Module] = []

    def look(part: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            several.append(part)

    with ExitStack() as hooks:
        for part in whole:
            hooks.callback(part.register_forward_hook(look).remove)
        yield
    for part in several:
        whole.pop(part, None)
