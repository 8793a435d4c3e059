"""Leaves a user's model as it was found: what measures a model computes inside of `as_found`."""

from __future__ import annotations

import inspect
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
        asked = [(p, p.requires_grad) for p in leaves if is_lazy(p) or not p.is_inference()]
        kept = [
            (part, type(part), each, each.copy())
            for part in parts
            for each in (vars(part), *vars(part).values())
            if type(each) in (dict, OrderedDict, list)
        ]
        tensors = [
            b
            for part in parts
            for b in part.buffers(recurse=False)
            if not (is_lazy(b) or b.is_inference())
        ]
        buffers = [(b, b._version, _entries(b).clone()) for b in tensors]
        generators = [
            (g, g.get_state())
            for part in parts
            for g in vars(part).values()
            if isinstance(g, torch.Generator)
        ]
        with random_numbers_kept():
            with _IDLE:
                _HELD.update(held)
            try:
                for part in parts:
                    part.training = False
                for p, _ in asked:
                    p.requires_grad = False
                yield
            finally:
                with _IDLE:
                    _IDLE.wait_for(lambda: held.isdisjoint(_GUESTS))
                    _HELD.difference_update(held)
                for generator, state in generators:
                    generator.set_state(state)
                for part, kind, now, before in kept:
                    if (
                        type(part) is not kind
                    ):  # a lazy module got its weights, and its hook is gone for good
                        continue
                    if isinstance(now, list):
                        now[:] = before
                    else:
                        for key in now.keys() - before.keys():
                            del now[key]
                        now.update(before)
                for part, training in modes:
                    part.training = training
                for p, required in asked:
                    p.requires_grad = required
                for b, version, value in buffers:
                    known = b.layout == torch.strided and not b.is_meta
                    if b._version != version or (
                        known and not torch.equal(_entries(b), value)
                    ):  # .data has no version
                        _entries(b).copy_(value)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """At the end the random numbers of torch, numpy and Python go on as if none had been drawn
    inside.
    """
    ours = random.getstate()
    numpys = np.random.get_state()
    try:
        with torch.random.fork_rng(
            range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        ):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)


def _entries(buffer: Tensor) -> Tensor:
    """The buffer's data, each entry that an expanded tensor repeats once: torch does not write to
    repeats.
    """
    if buffer.layout != torch.strided:
        return buffer.data
    return buffer.data[
        tuple(slice(1) if stride == 0 else slice(None) for stride in buffer.stride())
    ]


def leaving_as_found(function: Function) -> Function:
    """The function, run inside of `as_found` of its first argument."""
    first = next(iter(inspect.signature(function).parameters))

    @wraps(function)
    def measuring(*args: Any, **kwargs: Any) -> Any:
        with as_found(args[0] if args else kwargs.get(first)):
            return function(*args, **kwargs)

    return measuring  # type: ignore[return-value]  # the same function to its callers


def keep_as_found(ours: Ours, theirs: nn.Module) -> Ours:
    """Our modules around a user's, in evaluation mode. Each computes inside of `as_found` of
    itself, whoever calls it.
    """
    own = set(theirs.modules())
    for part in ours.modules():
        if part not in own:
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
    try:
        with nullcontext() if held else as_found(part):
            yield
    finally:
        if held:
            with _IDLE:
                _GUESTS[id(part)] -= 1
                if not _GUESTS[id(part)]:
                    del _GUESTS[id(part)]
                _IDLE.notify_all()
