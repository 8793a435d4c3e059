"""Calls whose intermediate results are recomputed in the backward pass, when autograd first needs
one of them.

The function runs with its graph. So parameters, captured tensors and gradient hooks (DDP, FSDP) see
the same graph as without recomputation. Only the tensors that the graph would keep are dropped and
numbered. When autograd needs the first of them, the function runs again under the same autocast and
with the same random numbers. The tensors that it saves this time replace the dropped ones.

`torch.utils.checkpoint` does the same with more overhead: it supports several backward passes at
once, nested calls and any arguments.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from solvers.capture import (
    autocast_state,
    check_unchanged,
    leaves_behind,
    random_states,
    saved_by,
    untraced,
)
from solvers.errors import SolveError

States = tuple[Tensor, ...]
Kind = tuple[torch.Size, torch.dtype]
Versions = dict[int, tuple[Tensor, int]]
"""By their numbers (id): leaves, each with its version."""
Advance = Callable[[Tensor], States]


@untraced
def recomputed(
    function: Advance, x: Tensor, *, hold: bool = False, checked: Sequence[int] = (0,)
) -> States:
    """function(x), of which autograd keeps x only. Raises SolveError in the backward pass if the
    second run of the function differs.

    `checked` are the indices of states to check for the same parameters in both runs; each is
    compared from the state before it. With `hold`, the call keeps its tensors until another call
    begins, and needs no recomputation until then. Use it for the call that the backward pass
    reaches first.
    """
    return _Call(function, x, checked, hold=hold).first(x)


class _Turn(threading.local):
    """The one call that holds its tensors. When another call needs its own, the earlier ones are no
    longer needed.
    """

    latest: weakref.ref[_Call] | None = None

    def take(self, call: _Call) -> None:
        previous: _Call | None = None
        if self.latest is not None:
            previous = self.latest()
        if previous is not None and previous is not call:
            previous.saved = {}
        self.latest = weakref.ref(call)


_TURN = _Turn()


class _Complete(BaseException):
    """All dropped tensors were saved again. It is a BaseException so that a field that catches its
    own exceptions does not catch it.
    """


class _Keep(torch.autograd.Function):
    """A node that keeps a tensor: autograd detects if it is changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        raise AssertionError("nothing depends on this node")


class _Call:
    def __init__(self, function: Advance, x: Tensor, checked: Sequence[int], *, hold: bool):
        self.function = function
        self.hold = hold
        self.checked = checked
        self.running = False
        self.needs_gradient = x.requires_grad
        self.device = x.device
        self.keeper = _Keep.apply(torch.empty(0, requires_grad=True), x)  # type: ignore[no-untyped-call]  # torch gives it no types
        self.autocast = [autocast_state(device, cached=True) for device in {x.device.type, "cpu"}]
        self.dropped: list[Kind] = []
        self.saved: dict[int, tuple[Tensor, int]] = {}
        self.random: list[Tensor] | None = None
        self.parameters: Versions = {}
        self.last: Tensor | None = None

    def first(self, x: Tensor) -> States:
        _TURN.take(self)
        random_before = random_states(self.device)
        hold = self.hold  # a function that differentiates sets it while it runs
        self.running = True
        with saved_tensors_hooks(self._drop, self._fetch):
            states = self.function(x)
        self.parameters = self._parameters(x, states)
        self.running = False
        self.last = states[-1].detach()  # the next call, or the user, keeps it anyway
        if not hold:
            self.saved = {}
        if not all(map(torch.equal, random_before, random_states(self.device))):
            self.random = random_before
        return states

    def _drop(self, tensor: Tensor) -> int:
        """The number of a dropped tensor."""
        number = len(self.dropped)
        self.dropped.append((tensor.shape, tensor.dtype))
        if self.hold:
            self.saved[number] = (tensor.detach(), tensor._version)
        return number

    def _fetch(self, number: int) -> Tensor:
        """The dropped tensor of that number."""
        _TURN.take(self)
        if number not in self.saved:
            self.saved = {i: (tensor, tensor._version) for i, tensor in enumerate(self._again())}
            if self.running:  # the function itself differentiates, and will do so again
                self.hold = True
        tensor, version = self.saved[number]
        check_unchanged(tensor, version)
        return tensor

    def _again(self) -> list[Tensor]:
        """The dropped tensors, from a second run of the function."""
        tensors: list[Tensor] = []
        for leaf, version in self.parameters.values():
            check_unchanged(leaf, version)

        def keep(tensor: Tensor) -> Tensor:
            number = len(tensors)
            if number == len(self.dropped):
                raise _different()
            if (tensor.shape, tensor.dtype) != self.dropped[number]:
                raise _different()
            tensors.append(tensor.detach())
            if self.running and len(tensors) == len(self.dropped):
                raise _Complete
            return tensors[-1]

        with contextlib.ExitStack() as stack:
            for settings in self.autocast:
                stack.enter_context(torch.autocast(**settings))
            if self.random is not None:
                stack.callback(_set_random, self.device, random_states(self.device))
                _set_random(self.device, self.random)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
            stack.enter_context(contextlib.suppress(_Complete))
            x = saved_by(self.keeper.grad_fn)[0].detach().requires_grad_(self.needs_gradient)
            states = self.function(x)
        if self.running:
            return tensors
        if len(tensors) < len(self.dropped):
            raise _different()
        if self._parameters(x, states).keys() != self.parameters.keys():
            raise SolveError(
                "a field uses other tensors when its steps are computed again for the gradient than"
                " the first time: did torch.func.functional_call replace its weights? Take the"
                " gradient inside it, or use gradient='backprop'"
            )
        if not _agree(states[-1].detach(), self.last):
            raise _different()
        return tensors

    def _parameters(self, alias: Tensor, states: States) -> Versions:
        """The leaves that the checked states depend on, except through the states before them."""
        x = saved_by(self.keeper.grad_fn)[0]
        starts = [states[i].grad_fn for i in self.checked]
        # the search ends at the states, which are x in both runs and the results
        ends = {x.grad_fn, *(states[i - 1].grad_fn for i in self.checked if i)}
        return {
            id(leaf): (leaf, leaf._version)
            for leaf in leaves_behind(starts, ends)
            if leaf is not x and leaf is not alias
        }


def _agree(again: Tensor, first: Tensor | None) -> bool:
    """Whether the second run ends in the first one's state, but for rounding errors."""
    if first is None or not first.numel():
        return True
    # not a sum of squares, which overflows for large states
    distance = (again - first).abs().max()
    limit = math.sqrt(torch.finfo(first.dtype).eps) * first.abs().max()
    if bool(distance.isfinite()):
        return not bool(distance > limit)
    return not bool(first.isfinite().all() or again.isfinite().all())


def _different() -> SolveError:
    return SolveError(
        "a field did something else when its steps were computed again for the gradient, or a"
        " tensor that it uses was changed in place before. It must do the same for the same time"
        " and state; or use gradient='backprop'"
    )


def _set_random(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
