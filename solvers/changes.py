"""Guards against functions that change a tensor which a solve still needs, and what to change where
torch raises an error in a field.

torch counts the changes in place of each tensor (its version), so that a check costs a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling

from solvers.errors import ConfigError
from solvers.segment import Segment


def version_of(x: Tensor) -> int | None:
    """How often the tensor was changed in place; None where torch does not count it, or for what is
    no tensor.
    """
    if is_compiling() or torch.is_inference_mode_enabled():  # a compiler cannot trace the latter
        return None
    try:
        return x._version
    except (RuntimeError, AttributeError):  # it was made in inference mode, or is no tensor
        return None


def has_changed(x: Tensor, version: int | None) -> bool:
    """Whether the tensor was changed in place since it had that version. False where torch does not
    count it. It is cheaper than `version_of`, which counts in a solve of small states.
    """
    return version is not None and x._version != version


def has_graph(x: Tensor) -> bool:
    """Whether x is the result of an operation with a graph; False for a compiler, which cannot
    trace that.
    """
    return not is_compiling() and x.grad_fn is not None


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
    if is_compiling():  # a compiler cannot trace the question
        return x
    if torch.is_inference_mode_enabled():
        return x.clone()
    return x


def owned(v: Tensor) -> Tensor:
    """A value of the field in memory that the field does not write to again: a copy, unless v is
    the result of an operation with a graph.
    """
    if is_compiling() or v.grad_fn is not None:
        return unshared(v)
    return v.clone()


def owned_state(y: Tensor, x: Tensor) -> Tensor:
    """The state y that a map of the state x returned, in memory that the map does not write to
    again: a copy, unless y is x itself, or the result of an operation with a graph that nothing has
    changed in place since.
    """
    if y is x or (has_graph(y) and version_of(y) == 0):
        return y
    return y.clone()


def read_only(function: Callable[..., Any], t: object, x: Tensor) -> Any:
    """function(t, x) with a copy of the state, so that numpy and `.data` cannot change the solve.

    Raises ConfigError if torch counts a change of it: the function may expect an effect.
    """
    given = x.clone()
    before = version_of(given)
    value = function(t, given)
    if version_of(given) != before:
        raise ConfigError(
            "on_step, or an event, changed the state in place: it may read the state only"
        )
    return value


def is_same_state(segment: Segment, y: Tensor, x: Tensor, version: int | None) -> bool:
    """Whether y, the state after the segment's `project`, is the state x before it, which had that
    version. A projection that works in place returns x itself, but changed.
    """
    if y is not x or segment.project is None:
        return y is x
    return version is not None and version_of(x) == version


def graph_version(slope: Tensor) -> int | None:
    """The version of a value of the field that has a graph; None for others, which are `owned`."""
    if not has_graph(slope):
        return None
    return version_of(slope)


def check_kept(slopes: Sequence[Tensor], versions: Sequence[int | None]) -> None:
    """Raises ConfigError if a value of the field with a graph has changed since it was returned.
    `versions` are their `graph_version`.
    """
    for slope, version in zip(slopes, versions, strict=True):
        got_a_graph = version is None and graph_version(slope) is not None
        if got_a_graph or has_changed(slope, version):
            raise ConfigError(CHANGED_VALUE)


def share_memory(slopes: Sequence[Tensor]) -> bool:
    """Whether two values of the field are in the same memory, so that the later one may have
    replaced the earlier one. torch does not count what numpy, `.data` or a replayed CUDA graph
    writes.

    Raises ConfigError for two different results of operations with graphs.
    """
    if is_compiling() or is_functorch_wrapped_tensor(slopes[0]):
        return False
    pointers = {slope.data_ptr() for slope in slopes}
    if len(pointers) == len(slopes):
        return False
    with_graph = {id(slope): slope for slope in slopes if has_graph(slope)}
    # one tensor may be returned again, and several views may be of one
    results = [slope.data_ptr() for slope in with_graph.values() if not slope._is_view()]
    if len(set(results)) < len(results):
        raise ConfigError(CHANGED_VALUE)
    return True


CHANGED_VALUE = (
    "the field returned a tensor that it changed afterwards, such as a buffer that it writes to:"
    " return a new tensor each time, as by v.clone()"
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
    "Can't call numpy()": (
        "the field computes with numpy, through which torch has no derivative, and this solve"
        " differentiates the field: compute with torch, or use an explicit method under"
        " torch.no_grad"
    ),
    "saved tensor hooks": (
        "the field differentiates by torch.func, which torch does not allow inside a recomputed"
        " solve: use torch.autograd.grad in the field, or gradient='backprop'"
    ),
}
"""Words of torch's errors in a field, and what to change."""
