"""Edits of one part of a model, which may make it another model's: the table `PART_EDITS`.

Most are those of the search for faults. Their words say what the edited part computes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ctrans.examine.comparison.attention_variants import (
    AttentionVariant,
    capped,
    narrower_window,
    one_later,
    one_less,
    scaled,
    uncapped,
    wider_window,
)
from ctrans.examine.search.edit import Act, Changes, Edit, MakeChanges, Subject, in_blocks
from ctrans.examine.search.edits import EDITS
from ctrans.examine.search.sites import Block, WeightSites
from ctrans.examine.search.whole_edits import ROTARY_BASES

EPS = (1e-3, 1e-5, 1e-6, 1e-8, 1e-12)
CAPS = (15.0, 20.0, 30.0, 50.0)
ACTIVATIONS: dict[str, Act] = {
    "the exact GELU": F.gelu,
    "GELU's tanh form": partial(F.gelu, approximate="tanh"),
    "GELU's sigmoid form": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": F.silu,
    "ReLU": F.relu,
}
VALUES: dict[str, Callable[[Any], Sequence[Any]]] = {
    "eps": lambda eps: EPS if isinstance(eps, float) else (),
    "cap": lambda cap: (None, *CAPS) if cap is None or isinstance(cap, float) else (),
    "base|theta": lambda base: ROTARY_BASES if isinstance(base, int | float) else (),
    "window": lambda window: (window - 1, window + 1) if isinstance(window, int) else (),
    "approximate": lambda approximate: ("none", "tanh") if isinstance(approximate, str) else (),
}
"""By what the name of a module's attribute has in it: the values that it may have."""


@dataclass(frozen=True)
class EditedPart:
    """A part of a model that is edited.

    - `subject`: the whole model
    - `modules`: those that the part may run, by their names, and their configurations
    - `number`: of the block, from 0 on
    """

    subject: Subject
    modules: Mapping[str, Any]
    number: int


PartEdits = Callable[[EditedPart], Iterator[Edit]]


def of_search(name: str) -> PartEdits:
    """The edits of that name of the search, in single blocks."""

    def edits(part: EditedPart) -> Iterator[Edit]:
        for edit in EDITS[name](part.subject):
            if edit.single or " in all " not in edit.words:
                yield edit

    return edits


def other_values(part: EditedPart) -> Iterator[Edit]:
    """Attributes of modules: eps, soft caps, rotary bases, windows, and what is on or off."""
    for name, module in part.modules.items():
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("_") or attribute == "training":
                continue
            for other in _values(attribute, value):
                yield with_attribute(name, module, attribute, other)


def _values(attribute: str, value: Any) -> Sequence[Any]:
    if isinstance(value, bool):
        return (not value,)
    for pattern, values in VALUES.items():
        if re.search(pattern, attribute, re.IGNORECASE):
            return [other for other in values(value) if other != value]
    return ()


def with_attribute(name: str, module: Any, attribute: str, value: Any) -> Edit:
    """A module, or a configuration, whose attribute has another value."""
    words = f"{name}.{attribute} {_in_words(value)} in place of"
    return Edit(
        f"{words} {_in_words(getattr(module, attribute))}",
        name,
        during=partial(_attribute, module, attribute, value),
    )


def _in_words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return str(value)


@contextlib.contextmanager
def _attribute(holder: Any, attribute: str, value: Any) -> Iterator[None]:
    before = getattr(holder, attribute)
    setattr(holder, attribute, value)
    try:
        yield
    finally:
        setattr(holder, attribute, before)


def other_attention(part: EditedPart) -> Iterator[Edit]:
    """Masks that are off by one, soft caps, other scales, and a softmax of fewer digits."""
    variants: dict[str, dict[str, Any]] = {
        "a mask that shows one token more": {"mask": one_later},
        "a mask that hides one token more": {"mask": one_less},
        "a window of one token more": {"mask": wider_window},
        "a window of one token less": {"mask": narrower_window},
        "its softmax in bfloat16": {"dtype": torch.bfloat16},
        "its softmax in float16": {"dtype": torch.float16},
        "its softmax in float32": {"dtype": torch.float32},
    }
    for cap in CAPS:
        variants[f"a soft cap of {cap:g} on its scores"] = {"scores": capped(cap)}
        variants[f"no soft cap of {cap:g} on its scores"] = {"scores": uncapped(cap)}
    for factor in (part.number + 1, 1 / (part.number + 1), 0.5, 2.0):
        variants[f"its scores times {factor:.4g}"] = {"scores": scaled(factor)}
    for words, changes in variants.items():
        yield Edit(words, "attention", during=partial(AttentionVariant, **changes))


class ActivationInstead(TorchFunctionMode):
    """Each activation is another one."""

    def __init__(self, activation: Act):
        super().__init__()
        self.activation = activation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("gelu", "silu", "relu"):
            given = dict(kwargs or {})
            return self.activation(given["input"] if "input" in given else args[0])
        return func(*args, **(kwargs or {}))


def other_activations(part: EditedPart) -> Iterator[Edit]:
    """Another activation, in modules of their own or in functions."""
    modules = [module for module in part.modules.values() if _is_activation(module)]
    for words, activation in ACTIVATIONS.items():
        yield Edit(words, "ffn", during=partial(_activation, modules, activation))


def _is_activation(module: Any) -> bool:
    if not isinstance(module, nn.Module):
        return False
    has_weights = any(True for _ in module.parameters())
    named = re.search("gelu|silu|relu|swish", type(module).__name__, re.IGNORECASE)
    return named is not None and not has_weights


@contextlib.contextmanager
def _activation(modules: Sequence[nn.Module], activation: Act) -> Iterator[None]:
    def instead(module: nn.Module, args: Any, output: Any) -> Tensor:
        return activation(args[0])

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(instead).remove)
        with ActivationInstead(activation):
            yield


def dropped_biases(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """A map without its bias."""
    for matrix in block.matrices.values():
        if matrix.bias is not None:
            yield f"no bias of {matrix.place}", partial(_zeros, sites, matrix.bias)


def _zeros(sites: WeightSites, name: str) -> Changes:
    return {name: torch.zeros_like(sites.weights[name])}


def interleaved(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """Gate and up in alternating rows, where they are one after the other, and the reverse; in one
    matrix or in two.
    """
    acts: dict[str, Act] = {
        "in alternating rows": lambda rows: torch.cat([rows[0::2], rows[1::2]]),
        "one after the other": lambda rows: torch.stack(rows.chunk(2), 1).flatten(0, 1),
    }
    names = [matrix.weight for matrix in block.matrices.values()]
    by_shape: dict[torch.Size, list[str]] = {}
    for name in names:
        by_shape.setdefault(sites.weights[name].shape, []).append(name)
        if sites.weights[name].shape[0] % 2 == 0:
            for words, act in acts.items():
                yield f"the halves of {name} {words}", partial(_acted, sites, (name,), act)
    for alike in by_shape.values():
        if len(alike) == 2:
            for words, act in acts.items():
                yield (
                    f"{alike[0]} and {alike[1]} {words}",
                    partial(_acted, sites, tuple(alike), act),
                )


def _acted(sites: WeightSites, names: tuple[str, ...], act: Act) -> Changes:
    """These matrices after a change of the rows of all of them."""
    made = act(torch.cat([sites.weights[name] for name in names]))
    return dict(zip(names, made.chunk(len(names)), strict=True))


def _in_single_blocks(edits: Any) -> PartEdits:
    kind = in_blocks(edits)
    return lambda part: (edit for edit in kind(part.subject) if edit.single)


PART_EDITS: dict[str, PartEdits] = {
    "values": other_values,
    "attention": other_attention,
    "activation": other_activations,
    "biases": _in_single_blocks(dropped_biases),
    "interleaved": _in_single_blocks(interleaved),
    **{
        name: of_search(name)
        for name in (
            "computation",
            "outside of blocks",
            "exchanged",
            "thirds",
            "transposed",
            "rotary halves",
            "grouped queries",
            "heads of thirds",
            "key heads",
            "gains",
            "sign",
            "left out",
        )
    },
}
"""By name, in the order in which they are named if several explain a part."""
