"""Which list of modules holds a model's blocks: by the names of their parts, or by what they do in
a forward pass.

In a forward pass each block is called once, with the state that the block before it gave.
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

Blocks = nn.ModuleList | nn.Sequential


def find_blocks(model: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """The model's blocks, by name. Raises ConfigError, listing what was found, unless exactly one
    list of blocks fits.
    """
    return blocks_at(model, block_list_by_name(model, anatomy))


def blocks_at(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules of the list at that path."""
    blocks: Any = model.get_submodule(path)
    return list(blocks)


def block_list_by_name(model: nn.Module, anatomy: Anatomy) -> str:
    """The path of the list whose modules have an attention and an FFN at the paths that are given
    or known. Errors as `find_blocks`.
    """
    lists = _lists(model)
    if anatomy.blocks is not None:
        if anatomy.blocks not in lists:
            raise ConfigError(f"the model has no list of modules {anatomy.blocks!r}: it has {_described(lists)}")
        return anatomy.blocks
    maps = {name: [named_maps(block, anatomy) for block in part] for name, part in lists.items()}
    fitting = [name for name, each in maps.items() if all(None not in pair for pair in each)]
    # the FFN can be seen when the block runs
    fitting = fitting or [name for name, each in maps.items() if all(attention is not None for attention, _ in each)]
    if len(fitting) != 1:
        found = "several lists" if fitting else "no list"
        raise ConfigError(
            f"{type(model).__name__} has {found} of blocks with an attention and an FFN of a known name; its lists are "
            f"{_described(lists)}: name them by anatomy=Anatomy(blocks=..., attention=..., ffn=...), or by --anatomy FILE.toml"
        )
    return fitting[0]


def block_list_by_calls(model: nn.Module, run: Callable[[], object], path: str | None) -> tuple[str, StateForm]:
    """The path of the list that holds the blocks, and how these hand on their state; the model is
    to be in eval mode.

    Without a path it is the one list whose modules do that and have weights of several kinds; of
    lists inside one another the one with the most modules. Raises ConfigError that names the lists
    where none does, or several.
    """
    lists = _lists(model)
    if path is not None and path not in lists:
        raise ConfigError(f"blocks=: the model has no list of modules {path!r}: it has {_described(lists)}")
    wanted = lists if path is None else {path: lists[path]}
    calls = observed({part for blocks in wanted.values() for part in blocks}, run)
    found = {name: _form(list(blocks), calls) for name, blocks in wanted.items()}
    forms = {name: form for name, form in found.items() if isinstance(form, StateForm)}
    if path is not None:
        if path not in forms:
            raise ConfigError(f"blocks=: {path!r} is no sequence of blocks: {found[path]}")
        return path, forms[path]
    fitting = {name: lists[name] for name in forms if all(_is_block(block) for block in lists[name])}
    fitting = {name: part for name, part in fitting.items() if not _within_larger(name, part, fitting)}
    if len(fitting) != 1:
        candidates = _described(fitting or lists)
        why = "several lists could be" if fitting else "no list of modules is called one after the other on one state"
        reasons = [f"{name!r}: {form}" for name, form in found.items() if isinstance(form, str)]
        why += f" ({'; '.join(reasons[:2])})" if reasons and not fitting else ""
        raise ConfigError(f"blocks=: which list of modules holds the blocks? {why}; candidates: {candidates}")
    (name,) = fitting
    return name, forms[name]


def form_of_blocks(run: Callable[[], object], blocks: Sequence[nn.Module]) -> StateForm | str:
    """How these blocks hand on their state; or why they are no sequence of blocks. The model is to
    be in eval mode.
    """
    return _form(blocks, observed(blocks, run))


def _form(blocks: Sequence[nn.Module], calls: Mapping[nn.Module, Sequence[tuple[Any, Any]]]) -> StateForm | str:
    """How they hand on their state; or why they are no sequence of blocks."""
    state: Tensor | None = None
    form: StateForm | None = None
    for i, block in enumerate(blocks):
        seen = calls[block]
        if len(seen) != 1:
            return f"module {i} is called {len(seen)} times in a forward pass"
        x, output = seen[0]
        if not is_state(x):
            if isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point():
                return (
                    f"module {i} is given {tuple(x.shape)}, several streams of states that it mixes, and a segment carries one state "
                    "(batch, tokens, width)"
                )
            return f"module {i} is given no state (batch, tokens, width) of real numbers"
        if state is not None and not (x.shape == state.shape and torch.equal(x, state)):
            return f"the state is changed before module {i}"
        found = form_of(output, x)
        if found is None:
            return f"module {i} gives no state of the shape {tuple(x.shape)} that it was given"
        form = found if form is None or form == found else dataclasses.replace(found, others=None)
        state = output if isinstance(output, Tensor) else output[form.part]
    return "it is empty" if form is None else form


def _is_block(block: nn.Module) -> bool:
    """Whether it may be a block: matrices in at least two modules."""
    return sum(has_matrix(part) for part in block.modules()) > 1


def _within_larger(name: str, part: Blocks, others: Mapping[str, Blocks]) -> bool:
    """Whether it holds, or lies in, a list of more modules; of two equal ones the outer counts."""
    for other, blocks in others.items():
        inside, around = other.startswith(f"{name}.") or name == "", name.startswith(f"{other}.") or other == ""
        if other != name and ((inside and len(blocks) > len(part)) or (around and len(blocks) >= len(part))):
            return True
    return False


def _lists(model: nn.Module) -> dict[str, Blocks]:
    """What may hold blocks, by its path."""
    return {name: part for name, part in model.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part)}


def _described(lists: Mapping[str, Blocks]) -> str:
    """'layers: 2 Layer (norm, body)', for each list."""
    each = []
    for name, part in lists.items():
        children = ", ".join(child for child, _ in part[0].named_children())
        each.append(f"{name}: {len(part)} {type(part[0]).__name__} ({children})")
    return "; ".join(each) or "none"
