"""Which list of modules holds a model's blocks, seen in a forward pass: each is called once, with the state that the one before gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ctrans.interop.anatomy import described, lists_of_modules
from ctrans.interop.block_calls import StateForm, bind, form_of, is_state
from ctrans.interop.module_chain import has_matrix
from solvers import ConfigError

Blocks = nn.ModuleList | nn.Sequential


def find_sequence(model: nn.Module, run: Callable[[], object], path: str | None) -> tuple[str, StateForm]:
    """The path of the list that holds the blocks, and how these hand on their state; the model is to be in eval mode.

    Without a path it is the one list whose modules do that and have weights of several kinds; of lists inside one another the one
    with the most modules. Raises ConfigError that names the lists where none does, or several.
    """
    lists = lists_of_modules(model)
    if path is not None and path not in lists:
        raise ConfigError(f"blocks=: the model has no list of modules {path!r}: it has {described(lists)}")
    wanted = lists if path is None else {path: lists[path]}
    calls = _calls({part for blocks in wanted.values() for part in blocks}, run)
    found = {name: _form(list(blocks), calls) for name, blocks in wanted.items()}
    forms = {name: form for name, form in found.items() if isinstance(form, StateForm)}
    if path is not None:
        if path not in forms:
            raise ConfigError(f"blocks=: {path!r} is no sequence of blocks: {found[path]}")
        return path, forms[path]
    fitting = {name: lists[name] for name in forms if all(_is_block(block) for block in lists[name])}
    fitting = {name: part for name, part in fitting.items() if not _within_larger(name, part, fitting)}
    if len(fitting) != 1:
        candidates = described(fitting or lists)
        why = "several lists could be" if fitting else "no list of modules is called one after the other on one state"
        reasons = [f"{name!r}: {form}" for name, form in found.items() if isinstance(form, str)]
        why += f" ({'; '.join(reasons[:2])})" if reasons and not fitting else ""
        raise ConfigError(f"blocks=: which list of modules holds the blocks? {why}; candidates: {candidates}")
    (name,) = fitting
    return name, forms[name]


def form_of_blocks(run: Callable[[], object], blocks: Sequence[nn.Module]) -> StateForm | str:
    """How these blocks hand on their state; or why they are no sequence of blocks. The model is to be in eval mode."""
    return _form(blocks, _calls(set(blocks), run))


def _calls(parts: set[nn.Module], run: Callable[[], object]) -> Mapping[nn.Module, list[tuple[Tensor | None, object]]]:
    """The state that each was given, and what it returned, for every call."""
    calls: dict[nn.Module, list[tuple[Tensor | None, object]]] = {part: [] for part in parts}

    def note(part: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        first = next(iter((*args, *kwargs.values())), None)
        streams = isinstance(first, Tensor) and first.is_floating_point() and first.dim() == 4
        x = first if streams else bind(type(part), args, kwargs).x if args or kwargs else None
        calls[part].append((x if isinstance(x, Tensor) else None, output))

    handles = [part.register_forward_hook(note, with_kwargs=True) for part in parts]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _form(blocks: Sequence[nn.Module], calls: Mapping[nn.Module, Sequence[tuple[Tensor | None, object]]]) -> StateForm | str:
    """How they hand on their state; or why they are no sequence of blocks."""
    state: Tensor | None = None
    form: StateForm | None = None
    for i, block in enumerate(blocks):
        seen = calls[block]
        if len(seen) != 1:
            return f"module {i} is called {len(seen)} times in a forward pass"
        x, output = seen[0]
        if x is None or not is_state(x):
            if x is not None and x.dim() == 4 and x.is_floating_point():
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
        state = output if isinstance(output, Tensor) else output[form.part]  # type: ignore[index]  # as its form says
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
