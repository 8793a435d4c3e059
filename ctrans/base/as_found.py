"""Leaves a user's model as it was found: what measures a model computes inside of `as_found`."""

from __future__ import annotations

import inspect
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Function = TypeVar("Function", bound=Callable[..., Any])
Ours = TypeVar("Ours", bound=nn.Module)

COMPUTED = ("embed", "forward", "outputs", "rows", "terminal_loss", "velocity")
"""Methods of our modules that compute with a user's modules."""
_LOCK = threading.RLock()
_HELD: set[int] = set()
"""The ids of the modules inside of `as_found`."""
_GUESTS: Counter[int] = Counter()
"""By id of a held module, how many computations with it are under way, those of other threads too.
"""
_IDLE = threading.Condition()
"""Guards `_HELD` and `_GUESTS`."""


@contextmanager
def as_found(model: Any) -> Iterator[None]:
    """Inside, the model is in evaluation mode and its weights need no gradients. At the end it is
    as it was, also after an exception: modes, `requires_grad`, hooks, buffers and
    `torch.Generator`s of each module, its attributes, the entries of those that are dicts or lists
    (not what these contain), and the global random numbers of torch, numpy and Python.

    It copies buffers and no weights. It may be nested. Threads wait for each other, and its end
    waits for computations of other threads with the model. An object without modules has random
    numbers only.
    """
    with _LOCK:
        modules = getattr(model, "modules", None)
        if callable(modules):
            parts = [part for part in modules() if id(part) not in _HELD]
        else:
            parts = []
        if _HELD and not parts:
            yield
            return
        held = {id(part) for part in parts}
        modes = [(part, part.training) for part in parts]
        leaves = [p for part in parts for p in part.parameters(recurse=False) if p.is_leaf]
        # torch could not set those of inference mode again
        settable = [p for p in leaves if is_lazy(p) or not p.is_inference()]
        gradients_required = [(p, p.requires_grad) for p in settable]
        containers = [_Container(part, value) for part in parts for value in _containers(part)]
        buffers = [_Buffer(buffer) for part in parts for buffer in _settable_buffers(part)]
        generators = [
            (generator, generator.get_state())
            for part in parts
            for generator in vars(part).values()
            if isinstance(generator, torch.Generator)
        ]
        with random_numbers_kept():
            with _IDLE:
                _HELD.update(held)
            try:
                for part in parts:
                    part.training = False
                for parameter in settable:
                    parameter.requires_grad = False
                yield
            finally:
                with _IDLE:
                    _IDLE.wait_for(lambda: held.isdisjoint(_GUESTS))
                    _HELD.difference_update(held)
                for generator, state in generators:
                    generator.set_state(state)
                for container in containers:
                    container.restore()
                for part, training in modes:
                    part.training = training
                for parameter, requires_grad in gradients_required:
                    parameter.requires_grad = requires_grad
                for buffer in buffers:
                    buffer.restore()


class _Container:
    """A dict or list of a module, with a copy of its entries."""

    def __init__(self, part: nn.Module, value: Any):
        self.part = part
        self.kind = type(part)
        self.value = value
        self.entries = value.copy()

    def restore(self) -> None:
        if type(self.part) is not self.kind:
            return  # a lazy module got its weights, and its hook is gone for good
        if isinstance(self.value, list):
            self.value[:] = self.entries
            return
        for key in self.value.keys() - self.entries.keys():
            del self.value[key]
        self.value.update(self.entries)


def _containers(part: nn.Module) -> list[Any]:
    """The module's dict of attributes, and those attributes that are dicts or lists."""
    values = (vars(part), *vars(part).values())
    return [value for value in values if type(value) in (dict, OrderedDict, list)]


class _Buffer:
    """A buffer, with a copy of its entries."""

    def __init__(self, buffer: Tensor):
        self.buffer = buffer
        self.version = buffer._version
        self.entries = _entries(buffer).clone()

    def restore(self) -> None:
        if self._changed():
            _entries(self.buffer).copy_(self.entries)

    def _changed(self) -> bool:
        if self.buffer._version != self.version:
            return True
        if self.buffer.layout != torch.strided or self.buffer.is_meta:
            return False
        # a change through .data leaves the version
        return not torch.equal(_entries(self.buffer), self.entries)


def _settable_buffers(part: nn.Module) -> list[Tensor]:
    """The module's own buffers to which torch can write again."""
    buffers = part.buffers(recurse=False)
    return [buffer for buffer in buffers if not is_lazy(buffer) and not buffer.is_inference()]


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """At the end the random numbers of torch, numpy and Python go on as if none had been drawn
    inside.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = range(0)
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _entries(buffer: Tensor) -> Tensor:
    """The buffer's data, each entry that an expanded tensor repeats once: torch does not write to
    repeats.
    """
    if buffer.layout != torch.strided:
        return buffer.data
    entries = buffer.data
    for axis, stride in enumerate(buffer.stride()):
        if stride == 0:
            entries = entries.narrow(axis, 0, min(1, entries.shape[axis]))
    return entries


def leaving_as_found(function: Function) -> Function:
    """The function, run inside of `as_found` of its first argument."""
    first = next(iter(inspect.signature(function).parameters))

    @wraps(function)
    def measuring(*args: Any, **kwargs: Any) -> Any:
        if args:
            model = args[0]
        else:
            model = kwargs.get(first)
        with as_found(model):
            return function(*args, **kwargs)

    return measuring  # type: ignore[return-value]  # the same function to its callers


def keep_as_found(ours: Ours, theirs: nn.Module) -> Ours:
    """Our modules around a user's, in evaluation mode. Each computes inside of `as_found` of
    itself, whoever calls it.
    """
    users_modules = set(theirs.modules())
    for part in ours.modules():
        if part in users_modules:
            continue
        part.training = False
        for name in COMPUTED:
            if inspect.isfunction(getattr(type(part), name, None)):
                setattr(part, name, partial(_computed, part, name))
    return ours


def _computed(part: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    with _guest(part):
        return getattr(type(part), name)(part, *args, **kwargs)


@contextmanager
def _guest(part: nn.Module) -> Iterator[None]:
    """Inside, the part is held: by whoever holds it, or by this. It takes no lock of a held part,
    since autograd computes in threads of its own while the holder waits for them.
    """
    with _IDLE:
        held = id(part) in _HELD
        if held:
            _GUESTS[id(part)] += 1
    if not held:
        with as_found(part):
            yield
        return
    try:
        yield
    finally:
        with _IDLE:
            _GUESTS[id(part)] -= 1
            if _GUESTS[id(part)] == 0:
                del _GUESTS[id(part)]
            _IDLE.notify_all()
