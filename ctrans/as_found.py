"""Leaves a user's model as it was found: what measures a model computes inside of `as_found`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

Function = TypeVar("Function", bound=Callable[..., Any])
Ours = TypeVar("Ours", bound=nn.Module)

COMPUTED = ("embed", "forward", "outputs", "rows", "terminal_loss", "velocity")
"""Methods of our modules that compute with a user's modules."""
_LOCK = threading.RLock()
_HELD: set[int] = set()
"""The ids of the modules inside of `as_found`."""


@contextlib.contextmanager
def as_found(model: Any) -> Iterator[None]:
    """Inside, the model is in evaluation mode and its weights need no gradients. At the end it is as
    it was, also after an exception: modes, `requires_grad`, attributes, hooks and buffers of each
    module, and the random numbers of torch, numpy and Python.

    It copies buffers and no weights. It may be nested; threads wait for each other. An object
    without modules has random numbers only.
    """
    with _LOCK:
        parts = [part for part in getattr(model, "modules", list)() if id(part) not in _HELD]
        if _HELD and not parts:
            yield
            return
        held = {id(part) for part in parts}
        modes = [(part, part.training) for part in parts]
        leaves = [p for part in parts for p in part.parameters(recurse=False) if p.requires_grad and p.is_leaf]
        asking = [p for p in leaves if is_lazy(p) or not p.is_inference()]  # torch could not set these again
        own = [each for part in parts for each in (vars(part), *vars(part).values()) if type(each) in (dict, OrderedDict, list)]
        kept: list[tuple[Any, Any]] = [(each, each.copy()) for each in own]
        tensors = [b for part in parts for b in part.buffers(recurse=False) if not (is_lazy(b) or b.is_inference())]
        buffers = [(b, b._version, b.detach().clone()) for b in tensors]
        numbers, more = random.getstate(), np.random.get_state()
        _HELD.update(held)
        try:
            with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
                for part in parts:
                    part.training = False
                for p in asking:
                    p.requires_grad = False
                yield
        finally:
            _HELD.difference_update(held)
            random.setstate(numbers)
            np.random.set_state(more)
            for now, before in kept:
                if isinstance(now, list):
                    now[:] = before
                else:
                    for key in now.keys() - before.keys():
                        del now[key]
                    now.update(before)
            for part, training in modes:
                part.training = training
            for p in asking:
                p.requires_grad = True
            for b, version, value in buffers:
                if b._version != version:
                    b.data.copy_(value)


def leaving_as_found(function: Function) -> Function:
    """The function, run inside of `as_found` of its first argument."""
    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def measuring(*args: Any, **kwargs: Any) -> Any:
        with as_found(args[0] if args else kwargs.get(first)):
            return function(*args, **kwargs)

    return measuring  # type: ignore[return-value]  # the same function to its callers


def keep_as_found(ours: Ours, theirs: nn.Module) -> Ours:
    """Our modules around a user's, in evaluation mode. Each computes inside of `as_found` of itself,
    whoever calls it.
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
    with contextlib.nullcontext() if id(part) in _HELD else as_found(part):
        return getattr(type(part), name)(part, *args, **kwargs)
