"""Guards against functions that change a tensor which a solve still needs, and what to change where
torch raises an error in a field.

torch counts the changes in place of each tensor (its version), so that a check costs a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling

from solvers.errors import ConfigError
from solvers.segment import Segment


def version_of(x: Tensor) -> int | None:
    """How often the tensor was changed in place; None where torch does not count it."""
    if torch.is_inference_mode_enabled() or is_compiling():
        return None
    try:
        return x._version
    except RuntimeError:  # it was made in inference mode
        return None


def copy_on_cpu(x: Tensor) -> Tensor | None:
    """A copy of a tensor that numpy could change, which torch does not count; otherwise None."""
    if x.device.type != "cpu" or is_compiling() or is_functorch_wrapped_tensor(x):
        return None
    return x.detach().clone()


def is_equal(copy: Tensor | None, x: Tensor) -> bool:
    """Whether x has the values of its copy. True without one."""
    if copy is None:
        return True
    x = x.detach()
    return torch.equal(copy, x) or bool(((copy == x) | copy.isnan()).all())


def unshared(x: Tensor) -> Tensor:
    """x; in `torch.inference_mode`, where torch does not count changes in place, a copy. A function
    that gets the copy, or that returned x, cannot change the state or a slope that is still needed.
    """
    if torch.is_inference_mode_enabled():
        return x.clone()
    return x


def is_same_state(segment: Segment, y: Tensor, x: Tensor, version: int | None) -> bool:
    """Whether y, the state after the segment's `project`, is the state x before it, which had that
    version. A projection that works in place returns x itself, but changed.
    """
    if y is not x or segment.project is None:
        return y is x
    return version is not None and version_of(x) == version


def check_kept(slopes: Iterable[Tensor], versions: list[int | None]) -> None:
    """Raises ConfigError if a value of the field has changed since it was returned."""
    if [version_of(slope) for slope in slopes] != versions:
        raise ConfigError(CHANGED_VALUE)


CHANGED_VALUE = (
    "the field returned a tensor that it changed afterwards, such as a buffer that it writes to:"
    " return a new tensor each time"
)


def advice_on(error: RuntimeError) -> str | None:
    """What to change, if the error of a field is one of `TORCH_ERRORS`."""
    for words, advice in TORCH_ERRORS.items():
        if words in str(error):
            return advice
    return None


TORCH_ERRORS = {
    "functions with out=": (
        "the field writes its value into a given tensor (out=), which torch cannot differentiate:"
        " return a new tensor, or use an explicit method under torch.no_grad"
    ),
    "saved tensor hooks": (
        "the field differentiates by torch.func, which torch does not allow inside a recomputed"
        " solve: use torch.autograd.grad in the field, or gradient='backprop'"
    ),
}
"""Words of torch's errors in a field, and what to change."""
