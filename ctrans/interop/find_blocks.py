"""Finds the list of modules that holds a model's blocks, by the names of their parts.

In a forward pass each block is called once, with the state that the block before it returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.interop.anatomy import Anatomy, named_maps
from ctrans.interop.block_calls import StateForm, form_of, is_state, observed
from solvers import ConfigError

Blocks = Sequence[nn.Module]


def find_blocks(model: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """The model's blocks, found by name. Raises ConfigError, listing what was found, unless exactly
    one list fits.
    """
    return blocks_at(model, block_list_by_name(model, anatomy))


def blocks_at(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules of the list at that path."""
    blocks: Any = model.get_submodule(path)
    if isinstance(blocks, nn.ModuleDict):
        return list(blocks.values())
    return list(blocks)


def blocks_named(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules of the list at that path. Raises ConfigError with all lists if there is none."""
    lists = module_lists(model)
    if path not in lists:
        raise ConfigError(
            f"blocks=: the model has no list of modules {path!r}: it has {_described(lists)}"
        )
    return blocks_at(model, path)


def block_list_by_name(model: nn.Module, anatomy: Anatomy) -> str:
    """The path of the list whose modules have an attention and an FFN at the given or usual paths.
    Errors as `find_blocks`.
    """
    lists = module_lists(model)
    if anatomy.blocks is not None:
        if anatomy.blocks not in lists:
            raise ConfigError(
                f"the model has no list of modules {anatomy.blocks!r}: it has {_described(lists)}"
            )
        return anatomy.blocks
    maps = {name: [named_maps(block, anatomy) for block in part] for name, part in lists.items()}
    fitting = [name for name, pairs in maps.items() if all(None not in pair for pair in pairs)]
    if not fitting:
        # blocks may have one map alone
        fitting = [
            name
            for name, pairs in maps.items()
            if all(attention is not None for attention, _ in pairs)
        ]
    if len(fitting) != 1:
        if fitting:
            count = "several lists"
        else:
            count = "no list"
        raise ConfigError(
            f"{type(model).__name__} has {count} of blocks with an attention and an FFN of a known"
            f" name; its lists are {_described(lists)}: give paths by anatomy=Anatomy(blocks=...,"
            " attention=..., ffn=...), or by --anatomy FILE.toml"
        )
    return fitting[0]


def form_of_blocks(
    run: Callable[[], object], blocks: Sequence[nn.Module]
) -> tuple[StateForm, Tensor] | str:
    """How these blocks return their state, and the state that the first one gets; or why they do
    not act in sequence. The model must be in eval mode.
    """
    calls = observed(blocks, run)
    state: Tensor | None = None
    first: Tensor | None = None
    form: StateForm | None = None
    for i, block in enumerate(blocks):
        seen = calls[block]
        if len(seen) != 1:
            return f"module {i} is called {len(seen)} times in a forward pass"
        x, output = seen[0]
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 3:
            return (
                f"module {i} gets states {tuple(x.shape)} of {x.dim()} axes, such as several"
                " streams: ctrans reads states (batch, tokens, width)"
            )
        if not is_state(x):
            return f"module {i} gets no floating-point state (batch, tokens, width)"
        if state is not None and not (x.shape == state.shape and torch.equal(x, state)):
            return f"the model changes the state before module {i}"
        form_here = form_of(output, x)
        if form_here is None:
            return f"module {i} returns no state of the shape {tuple(x.shape)} of its input"
        if form is None or form == form_here:
            form = form_here
        else:
            form = dataclasses.replace(form_here, length=None)
        if first is None:
            first = x
        if isinstance(output, Tensor):
            state = output
        else:
            state = output[form.part]
    if form is None or first is None:
        return "it is empty"
    return form, first


def module_lists(model: nn.Module) -> dict[str, Blocks]:
    """Lists of modules that may hold blocks, by path."""
    lists: dict[str, Blocks] = {}
    for name, part in model.named_modules():
        if not isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        if len(part) == 0 or "parametrizations" in name:
            continue
        blocks = blocks_at(model, name)
        if None not in blocks:
            lists[name] = blocks
    return lists


def _described(lists: Mapping[str, Blocks]) -> str:
    """Each list as 'layers: 2 Layer (norm, body)'."""
    if not lists:
        return "none"
    descriptions = []
    for name, part in lists.items():
        children = ", ".join(child for child, _ in part[0].named_children())
        descriptions.append(f"{name}: {len(part)} {type(part[0]).__name__} ({children})")
    return "; ".join(descriptions)
