"""The weights by name among the objects of a file that torch.save wrote.

A file may set attributes of its dictionaries and tensors. Methods are therefore those of the
classes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from solvers import ConfigError, shown

LOGGER = logging.getLogger("ctrans.interop")
HOLDERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which trainers keep the weights among other things."""
NAMED = 5
"""How many entries that are left out are named."""


def named_tensors(path: Path, content: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors by name, and the names of other entries of the file that hold numbers.

    Raises ConfigError for no tensors by name, and where it is not clear which weights the model
    has: two dictionaries of weights, two equal names, or tensors inside of other entries.
    """
    left_out: list[str] = []
    for _ in HOLDERS:
        holder = _holder(path, content)
        if holder is None:
            break
        left_out += _next_to(path, content, holder)
        content = dict.get(content, holder)
    tensors: dict[str, Tensor] = {}
    inside: list[str] = []
    if isinstance(content, dict):
        for key, value in dict.items(content):
            name = _name(key)
            if isinstance(value, Tensor):
                if name in tensors:
                    raise ConfigError(
                        f"{str(path)!r} holds two tensors with the name {shown(name)}: rename one"
                    )
                tensors[name] = Tensor.detach(value)
            elif _holds_numbers(value):
                inside.append(shown(name))
    if not tensors:
        raise ConfigError(
            f"{str(path)!r} holds no tensors by name: give a file of weights, as"
            " pytorch_model.bin is"
        )
    if inside:
        raise ConfigError(
            f"{str(path)!r} holds tensors by name, and more of them inside of {inside[0]}: save one"
            " dictionary of all weights by name, as model.state_dict() is"
        )
    return tensors, left_out


def say_left_out(path: Path, left_out: list[str]) -> None:
    """Says which entries of the file are not read."""
    if not left_out:
        return
    names = ", ".join(left_out[:NAMED])
    if len(left_out) > NAMED:
        names += f" and {len(left_out) - NAMED} more"
    LOGGER.warning("%r: left out is what its file holds next to the weights: %s", str(path), names)


def _holder(path: Path, content: Any) -> str | None:
    """The key of the weights; None if there is none. Raises ConfigError for two such keys."""
    if not isinstance(content, dict):
        return None
    holders = [
        key
        for key in HOLDERS
        if isinstance(dict.get(content, key), dict) and _holds_numbers(dict.get(content, key))
    ]
    if len(holders) > 1:
        raise ConfigError(
            f"{str(path)!r} holds weights under {holders[0]!r} and under {holders[1]!r}: save one"
            " of the two"
        )
    return next(iter(holders), None)


def _next_to(path: Path, content: dict[Any, Any], holder: str) -> list[str]:
    """The other entries that hold numbers, as the states of an optimiser. Raises ConfigError for a
    tensor whose name is that of a weight.
    """
    names: list[str] = []
    for key, value in dict.items(content):
        if key == holder or not _holds_numbers(value):
            continue
        name = shown(_name(key))
        if isinstance(value, Tensor) and "." in name:
            raise ConfigError(
                f"{str(path)!r} holds weights under {holder!r}, and {name} next to it: save one"
                " dictionary of all weights by name"
            )
        names.append(name)
    return names


def _name(key: object) -> str:
    """The key as a text; the whole text of tuples in tuples may have no end."""
    if isinstance(key, str):
        return key
    return shown(key)


def _holds_numbers(value: Any) -> bool:
    """Whether it is, or holds at any depth, a tensor of floating-point numbers."""
    waiting = [value]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            if Tensor.is_floating_point(item):
                return True
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                waiting.extend(dict.values(item))
            elif isinstance(item, (list, tuple)):
                waiting.extend(item)
    return False
