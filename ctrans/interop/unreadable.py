"""Why no reader can follow a module: it computes something else each time, or nan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.base.broken_entries import broken_tensors
from ctrans.interop.block_calls import tensors_in
from ctrans.interop.example_inputs import Example
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from solvers.run import finite


@dataclass(frozen=True)
class SeenCall:
    """A call of one module: a sum for each tensor that it got and returned, in place of the
    tensors themselves, and whether all entries were finite.
    """

    name: str
    inputs: tuple[float, ...]
    outputs: tuple[float, ...]
    inputs_finite: bool
    outputs_finite: bool


def why_unreadable(module: nn.Module, example: Example) -> str:
    """What is wrong with the module's own forward pass on the example, in evaluation mode; "" if it
    runs, repeats itself, and its output is finite.

    The place is the first module whose inputs are as they should be and whose outputs are not.
    """
    name = type(module).__name__
    try:
        with as_found(module), torch.no_grad():
            first, calls = _watched(module, example)
            second, calls_again = _watched(module, example)
    except FOREIGN_ERRORS:
        return ""
    if not all(finite(output) for output in first):
        place = next(
            (call.name for call in calls if call.inputs_finite and not call.outputs_finite), name
        )
        stored = ""
        for kind, broken_name, broken, count in broken_tensors(module):
            stored = (
                f" The {kind} {broken_name} has {broken} of {count} entries that are nan or inf."
            )
            break
        return (
            f"{name} is not finite: on its example the output has nan or inf, first in {place}."
            f"{stored} Look there for a row of attention that is masked whole, a division by 0, or"
            " numbers that are too large for the dtype"
        )
    apart = max(map(_relative_difference, first, second), default=0.0)
    if apart == 0:
        return ""
    place = next(
        (
            call.name
            for call, again in zip(calls, calls_again, strict=False)
            if call.inputs == again.inputs and call.outputs != again.outputs
        ),
        name,
    )
    return (
        f"{name} is not the same twice: in evaluation mode the outputs of two passes differ by"
        f" {apart:.2g} of their size, first in {place}. Dropout or noise stays on there: switch it"
        " off in evaluation mode, as by dropout_p=p if self.training else 0.0"
    )


def _watched(module: nn.Module, example: Example) -> tuple[list[Tensor], list[SeenCall]]:
    """The floating-point tensors that the module returns, and the calls of its parts in the order
    in which they end.
    """
    calls: list[SeenCall] = []
    with _hooks(module, calls):
        if isinstance(example, Mapping):
            output = module(**example)
        else:
            output = module(_like_the_weights(module, example))
    return _numbers(output), calls


@contextlib.contextmanager
def _hooks(module: nn.Module, calls: list[SeenCall]) -> Iterator[None]:
    """Inside, each call of a part of the module is appended to `calls`."""

    def seen_by(name: str) -> Any:
        def seen(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = _numbers((args, kwargs))
            outputs = _numbers(output)
            calls.append(
                SeenCall(
                    name,
                    tuple(map(_sum, inputs)),
                    tuple(map(_sum, outputs)),
                    all(map(finite, inputs)),
                    all(map(finite, outputs)),
                )
            )

        return seen

    handles = []
    try:
        for path, part in module.named_modules():
            name = f"{path or 'the module itself'} ({type(part).__name__})"
            handles.append(part.register_forward_hook(seen_by(name), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _numbers(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def _sum(tensor: Tensor) -> float:
    """A sum that differs if a few entries do."""
    weights = torch.linspace(1, 2, max(tensor.numel(), 1), dtype=torch.float64)
    return float(tensor.detach().double().cpu().flatten() @ weights[: tensor.numel()])


def _relative_difference(first: Tensor, second: Tensor) -> float:
    if first.shape != second.shape:
        return 1.0
    size = float(first.double().norm())
    return float((first.double() - second.double()).norm()) / (size or 1.0)


def _like_the_weights(module: nn.Module, example: Tensor) -> Tensor:
    """The example in the dtype and on the device of the module's weights."""
    weights = (weight for weight in module.parameters() if weight.is_floating_point())
    like = next(weights, None)
    if like is None:
        return example
    if example.is_floating_point():
        return example.to(like.device, like.dtype)
    return example.to(like.device)
