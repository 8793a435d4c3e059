"""Finds the list of modules that holds a model's blocks: by the names of their parts, or by what
they do in a forward pass.

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
from ctrans.interop.module_chain import has_matrix
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
    return list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)


def block_list_by_name(model: nn.Module, anatomy: Anatomy) -> str:
    """The path of the list whose modules have an attention and an FFN at the given or usual paths.
    Errors as `find_blocks`.
    """
    lists = _lists(model)
    if anatomy.blocks is not None:
        if anatomy.blocks not in lists:
            raise ConfigError(
                f"the model has no list of modules {anatomy.blocks!r}: it has {_described(lists)}"
            )
        return anatomy.blocks
    maps = {name: [named_maps(block, anatomy) for block in part] for name, part in lists.items()}
    fitting = [name for name, each in maps.items() if all(None not in pair for pair in each)]
    # an FFN without a known name is found when the block runs
    fitting = fitting or [
        name for name, each in maps.items() if all(attention is not None for attention, _ in each)
    ]
    if len(fitting) != 1:
        if fitting:
            found = "several lists"
        else:
            found = "no list"
        raise ConfigError(
            f"{type(model).__name__} has {found} of blocks with an attention and an FFN of a known"
            f" name; its lists are {_described(lists)}: give paths by anatomy=Anatomy(blocks=...,"
            " attention=..., ffn=...), or by --anatomy FILE.toml"
        )
    return fitting[0]


def block_list_by_calls(
    model: nn.Module, run: Callable[[], object], path: str | None
) -> tuple[str, StateForm]:
    """The path of the list that holds the blocks, and how they return their state. The model must
    be in eval mode.

    Without a path it is the one list whose modules act in sequence and have weights in several
    modules; of nested lists, the one with the most modules. Raises ConfigError, naming the lists,
    if none or several fit.
    """
    lists = _lists(model)
    if path is not None and path not in lists:
        raise ConfigError(
            f"blocks=: the model has no list of modules {path!r}: it has {_described(lists)}"
        )
    if path is None:
        wanted = lists
    else:
        wanted = {path: lists[path]}
    calls = observed({part for blocks in wanted.values() for part in blocks}, run)
    found = {name: _form(blocks, calls) for name, blocks in wanted.items()}
    forms = {name: form for name, form in found.items() if isinstance(form, StateForm)}
    if path is not None:
        if path not in forms:
            raise ConfigError(f"blocks=: {path!r} is no sequence of blocks: {found[path]}")
        return path, forms[path]
    # a block has at least two modules with a matrix
    fitting = {
        name: lists[name]
        for name in forms
        if all(sum(map(has_matrix, block.modules())) > 1 for block in lists[name])
    }
    fitting = {
        name: part for name, part in fitting.items() if not _within_larger(name, part, fitting)
    }
    if len(fitting) != 1:
        if fitting:
            raise ConfigError(
                "blocks=: give the path of the list of blocks: several lists could be; candidates:"
                f" {_described(fitting)}"
            )
        reasons = [f"{name!r}: {form}" for name, form in found.items() if isinstance(form, str)]
        if reasons:
            why = f" ({'; '.join(reasons[:2])})"
        else:
            why = ""
        raise ConfigError(
            f"{type(model).__name__} has no list of modules that act in sequence on one state{why},"
            f" so no blocks= can name one; its lists are {_described(lists)}: make each step of its"
            " forward pass a module of one list, which gets what the one before returned"
        )
    (name,) = fitting
    return name, forms[name]


def form_of_blocks(run: Callable[[], object], blocks: Sequence[nn.Module]) -> StateForm | str:
    """How these blocks return their state; or why they do not act in sequence. The model must be in
    eval mode.
    """
    return _form(blocks, observed(blocks, run))


def _form(
    blocks: Sequence[nn.Module], calls: Mapping[nn.Module, Sequence[tuple[Any, Any]]]
) -> StateForm | str:
    """How they return their state; or why they do not act in sequence."""
    state: Tensor | None = None
    form: StateForm | None = None
    for i, block in enumerate(blocks):
        seen = calls[block]
        if len(seen) != 1:
            return f"module {i} is called {len(seen)} times in a forward pass"
        x, output = seen[0]
        if not is_state(x):
            return f"module {i} gets no floating-point state (batch, tokens, width)"
        if state is not None and not (x.shape == state.shape and torch.equal(x, state)):
            return f"the model changes the state before module {i}"
        found = form_of(output, x)
        if found is None:
            return f"module {i} returns no state of the shape {tuple(x.shape)} of its input"
        if form is None or form == found:
            form = found
        else:
            form = dataclasses.replace(found, others=None)
        if isinstance(output, Tensor):
            state = output
        else:
            state = output[form.part]
    return form or "it is empty"


def _within_larger(name: str, part: Blocks, others: Mapping[str, Blocks]) -> bool:
    """Whether it holds, or is inside of, a list with more modules; of two equal lists the outer one
    is kept.
    """
    for other, blocks in others.items():
        inside = other.startswith(f"{name}.") or name == ""
        around = name.startswith(f"{other}.") or other == ""
        if other != name and (
            (inside and len(blocks) > len(part)) or (around and len(blocks) >= len(part))
        ):
            return True
    return False


def _lists(model: nn.Module) -> dict[str, Blocks]:
    """Lists of modules that may hold blocks, by path."""
    return {
        name: blocks_at(model, name)
        for name, part in model.named_modules()
        if isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        and len(part)
        and "parametrizations" not in name
        and None not in blocks_at(model, name)
    }


def _described(lists: Mapping[str, Blocks]) -> str:
    """Each list as 'layers: 2 Layer (norm, body)'."""
    each = []
    for name, part in lists.items():
        children = ", ".join(child for child, _ in part[0].named_children())
        each.append(f"{name}: {len(part)} {type(part[0]).__name__} ({children})")
    return "; ".join(each) or "none"
