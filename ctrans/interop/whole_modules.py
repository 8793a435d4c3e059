"""Which modules are one operation each."""

from __future__ import annotations

from torch import nn

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
