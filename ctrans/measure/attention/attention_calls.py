"""The calls of torch by which any model computes its attention, seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch.overrides import TorchFunctionMode

KERNEL: Callable[..., Any] = F.scaled_dot_product_attention
SOFTMAXES: tuple[Callable[..., Any], ...] = (torch.softmax, F.softmax, Tensor.softmax)
Looks = Mapping[Callable[..., Any], Callable[..., None]]
"""By torch function, what is done with each of its calls."""
_UNSEEN = ContextVar("unseen", default=False)


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, `AttentionCalls` show no calls: those of a pass that only finds out how a model
    computes are not the ones looked for.
    """
    token = _UNSEEN.set(True)
    try:
        yield
    finally:
        _UNSEEN.reset(token)


class AttentionCalls(TorchFunctionMode):
    """A mode that shows the calls of some torch functions, and does not change them. It does not
    show the calls that these functions make themselves, nor those inside of a transform of
    torch.func that begins later, such as torch.vmap, which hides the axis of the batch.

    - `before`: by torch function, a function that gets the arguments before the call
    - `after`: by torch function, a function that gets the output and then the arguments
    """

    def __init__(self, *, before: Looks | None = None, after: Looks | None = None):
        super().__init__()
        self.before = before or {}
        self.after = after or {}
        self._transforms = get_dynamic_layer_stack_depth()

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _UNSEEN.get() or get_dynamic_layer_stack_depth() > self._transforms:
            return function(*args, **kwargs)
        if function in self.before:
            self.before[function](*args, **kwargs)
        output = function(*args, **kwargs)
        if function in self.after:
            self.after[function](output, *args, **kwargs)
        return output


def looks(kernel: Callable[..., None], softmax: Callable[..., None]) -> Looks:
    """One function for calls of the fused kernel, and one for those of each softmax."""
    return {KERNEL: kernel, **dict.fromkeys(SOFTMAXES, softmax)}


class KernelCall(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def softmax_input(*args: Any, **kwargs: Any) -> Tensor:
    """The scores that a softmax is given."""
    scores: Tensor = args[0] if args else kwargs["input"]
    return scores
