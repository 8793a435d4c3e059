"""Which modules of a foreign block are its attention and its FFN, seen in what they do while it runs: no name is needed.

Attention is the smallest module in which a token's output depends on other tokens. What acts on its output alone (dropout, a scale by
channel) belongs to it. The FFN is the smallest module that holds the linear maps that act after it, or, where the block itself holds
them, these maps one after the other, with what stands between them: an activation, or a gate. There may be none (Mamba).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.interop.anatomy import Anatomy, named_maps, parts_of
from ctrans.interop.block_calls import Running, is_state
from ctrans.interop.ffn_in_model import KNOWN, Activated, GatedUnits
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.module_chain import ModuleChain, has_matrix, is_linear
from ctrans.interop.multihead import UnfoldedAttention, unfolds
from ctrans.interop.norms import as_norm
from ctrans.interop.recorded_calls import Act, CalledAs, first_tensor, watched
from ctrans.interop.tolerances import unit
from solvers import ConfigError


@dataclasses.dataclass(frozen=True)
class Part:
    """A map, and the block's own modules that it is made of, in the order in which they act."""

    chain: ModuleChain
    own: tuple[nn.Module, ...]

    @property
    def inside(self) -> set[nn.Module]:
        """All modules that it is made of."""
        return {part for module in self.own for part in module.modules()}


@dataclasses.dataclass(frozen=True)
class Parts:
    """The maps of a block, and what attention is given besides the state: keyword arguments of its chain. `ffn` is None for a block of
    one map. `own_calls` says whether attention is called as the block calls it, or with what the block is.
    """

    attention: Part
    ffn: Part | None
    context: dict[str, Any]
    own_calls: bool


def named_parts(block: nn.Module, anatomy: Anatomy, context: dict[str, Any]) -> Parts | None:
    """The parts that the anatomy or a known name says, attention to be called with what the block is; None unless both are."""
    maps = named_maps(block, anatomy)
    if None in maps:
        return None
    attention, ffn = (Part(ModuleChain(modules), tuple(modules)) for modules in maps if modules is not None)
    return Parts(attention, ffn, context, own_calls=False)


def seen_parts(running: Running, x: Tensor, anatomy: Anatomy, *, own_calls: bool) -> Parts:
    """The parts as seen when the block runs on that state, those that the anatomy names as it says.

    With `own_calls` attention is called as the block calls it; otherwise, where it has a known name, with what the block is given.
    Raises ConfigError, naming what to give, where a part is not found, and for blocks of more or fewer than the two maps.
    """
    block = running.block
    with watched({path: part for path, part in block.named_modules() if part is not block}) as acts:
        running(x)
    named = named_maps(block, anatomy)
    for what, path, found in (("attention", anatomy.attention, named[0]), ("FFN", anatomy.ffn, named[1])):
        if path is not None and found is None:
            raise ConfigError(
                f"no {what} found in {type(block).__name__}, which has {parts_of(block)}: it has nothing at {path!r}"
            )
    own_calls = own_calls or named[0] is None
    if own_calls:
        attention, context = _attention(block, acts, running, None if anatomy.attention is None else named[0])
    else:
        assert named[0] is not None, "or it is called as seen"
        attention, context = Part(ModuleChain(named[0]), tuple(named[0])), running.call.context
    _check_one_sequence(block, [*acts], attention, x)
    ffn = _ffn(block, acts, attention) if anatomy.ffn is None or named[1] is None else _given_ffn(block, acts, named[1])
    return Parts(attention, ffn, context, own_calls)


def check_roles(running: Running, x: Tensor, anatomy: Anatomy) -> None:
    """Raises ConfigError where what is named attention mixes no tokens and something else does, or what is named FFN mixes them.

    Of blocks that add both at once, a sum, nothing else would tell that the two were swapped.
    """
    if anatomy.attention is None and anatomy.ffn is None:
        return
    block = running.block
    with watched({path: part for path, part in block.named_modules() if part is not block}) as acts:
        running(x)
    attention, ffn = (set(part or ()) for part in named_maps(block, anatomy))
    mixing = _smallest([act for act in acts if _mixes(act, running)])
    inside = {name: {part for module in own for part in module.modules()} for name, own in (("a", attention), ("f", ffn))}
    mixes = {name: any(act.module in parts for act in mixing) for name, parts in inside.items()}
    kind = type(block).__name__
    if anatomy.attention is not None and attention and mixing and not mixes["a"]:
        if anatomy.ffn is not None and mixes["f"]:
            raise ConfigError(
                f"attention= and ffn= are swapped: in {kind} {_path(anatomy.ffn)} mixes tokens and {_path(anatomy.attention)} does not; "
                f"give attention={anatomy.ffn!r}, ffn={anatomy.attention!r}"
            )
        raise ConfigError(
            f"attention=: {_path(anatomy.attention)} of {kind} mixes no tokens, as an FFN does, and {mixing[0].path} does: give "
            f"attention={mixing[0].path!r}, or leave it out"
        )
    if anatomy.ffn is not None and mixes["f"] and (not mixes["a"] or attention & ffn):
        raise ConfigError(
            f"ffn=: {_path(anatomy.ffn)} of {kind} mixes tokens, as attention does: name it by attention=, and by ffn= what acts on "
            "each token alone, or leave both out"
        )


def _path(named: str | Sequence[str]) -> str:
    return repr(named) if isinstance(named, str) else " then ".join(map(repr, named))


def _check_one_sequence(block: nn.Module, acts: Sequence[Act], attention: Part, x: Tensor) -> None:
    """Raises ConfigError where a part beside attention is given a state that the block did not make, as cross-attention is."""
    own = {part.data_ptr() for part in (x, *(act.x for act in acts), *(act.y for act in acts)) if isinstance(part, Tensor)}
    for act in acts:
        given = (*act.template.args, *act.template.kwargs.values())
        others = [value for value in given if is_state(value) and value.data_ptr() not in own]
        if others and act.module not in attention.inside and is_state(act.x) and act.y is not None:
            raise ConfigError(
                f"{act.path} ({type(act.module).__name__}) of {type(block).__name__} reads a second sequence: cross-attention is not "
                "known here, so take a model, or blocks=, without it"
            )


def _attention(
    block: nn.Module, acts: Sequence[Act], running: Running, given: Sequence[nn.Module] | None
) -> tuple[Part, dict[str, Any]]:
    tokens_first = running.form.tokens_first
    if given is not None:
        act = next((act for act in acts if act.module is given[0]), None)
        if act is None:
            raise ConfigError(f"attention=: {type(block).__name__} does not call its {type(given[0]).__name__}")
    else:
        mixing = _smallest([act for act in acts if _mixes(act, running)])
        if len(mixing) != 1:
            raise ConfigError(_no_attention(block, mixing))
        act = mixing[0]
    stages, own = _extended([act], acts)
    if given is not None and len(given) > 1:
        stages, own = list(given), list(given)
    first: nn.Module = CalledAs(act.module, tokens_first)
    if unfolds(act.module, act.template):
        first = UnfoldedAttention(act.module, tokens_first)  # type: ignore[arg-type]  # it is of that class
    return Part(ModuleChain([first, *stages[1:]]), tuple(own)), {"call": act.template.alone(act.x)}


def _no_attention(block: nn.Module, mixing: Sequence[Act]) -> str:
    kind = type(block).__name__
    if mixing:
        found = ", ".join(f"{act.path} ({type(act.module).__name__})" for act in mixing)
        return (
            f"attention=: several modules of {kind} mix tokens, {found}: blocks of one attention and one FFN are known (no "
            "cross-attention, no convolution beside attention); name one only if the others do nothing"
        )
    return (
        f"no module of {kind} mixes tokens by itself, so its own forward does: put attention, from its input's projections to its "
        f"output's, into a module of its own that forward calls, which is then found; {kind} has {parts_of(block)}"
    )


def _mixes(act: Act, running: Running) -> bool:
    """Whether another token's output changes with one token of its input."""
    if is_linear(act.module) or not is_state(act.x) or not is_state(act.y) or act.x.shape[:2] != act.y.shape[:2]:
        return False
    form = running.form
    if form.turned(act.x).shape[:2] != running.call.x.shape[:2]:
        return False  # its axes are others than the block's, as where a convolution is given channels first
    changed = form.turned(act.x).clone()
    if changed.shape[1] < 2:
        return False
    changed[:, 0] = -changed[:, 0] + 1
    outputs = []
    try:  # what it gave then may have been changed in its place since
        for x in (act.x, form.turned(changed)):
            args, kwargs = act.template.with_state(x)
            outputs.append(first_tensor(act.module(*args, **kwargs)))
    except FOREIGN_ERRORS:
        return False
    same, found = (form.turned(output)[:, 1:] for output in outputs)
    return float((found - same).norm()) > 64 * unit(same.dtype) * float(same.norm())


def _smallest(acts: Sequence[Act]) -> list[Act]:
    """Those that hold no other of them, each module once."""
    modules = {act.module: act for act in acts}
    return [act for module, act in modules.items() if not any(other in modules for other in list(module.modules())[1:])]


def _extended(chain: list[Act], acts: Sequence[Act]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The chain with every later leaf that acts on its output alone and is no norm, as stages and as the block's own modules."""
    inside = {part for act in chain for part in act.module.modules()}
    y, found = chain[-1].y, [act.module for act in chain]
    # a branch that others read too, such as a state that goes on, is not handed on by a leaf
    for act in _leaves(acts):
        later = acts.index(act) > acts.index(chain[-1])
        if later and act.module not in inside and act.x is y and as_norm(act.module, act.x.shape[-1]) is None:
            found.append(act.module)
            y = act.y
    return found, found


def _leaves(acts: Sequence[Act]) -> list[Act]:
    return [act for act in acts if next(act.module.children(), None) is None]


def _ffn(block: nn.Module, acts: Sequence[Act], attention: Part) -> Part | None:
    kind = type(block).__name__
    start = next(i for i, act in enumerate(acts) if act.module is attention.own[0])
    leaves = [act for act in _leaves(acts) if act.module not in attention.inside]
    weighty = [act for act in leaves if has_matrix(act.module) and as_norm(act.module, act.x.shape[-1]) is None]
    if not weighty:
        return None
    early = next((act for act in weighty if acts.index(act) < start), None)
    if early is not None:
        raise ConfigError(
            f"{early.path} ({type(early.module).__name__}) acts before attention in {kind}: blocks of attention and then an FFN are known"
        )
    holder = _holder(block, acts, [act.path for act in weighty], attention)
    if holder is not None:
        stages, own = _extended([holder], acts)
        call = holder.template.alone(holder.x)
        first = CalledAs(holder.module, always=call) if call.adds else holder.module
        return Part(ModuleChain([first, *stages[1:]]), tuple(own))
    return _line(kind, leaves, weighty, acts)


def _given_ffn(block: nn.Module, acts: Sequence[Act], given: Sequence[nn.Module]) -> Part:
    """The modules one after the other, with what the block computes between them by functions."""
    own = [act for act in acts if act.module in given]
    missing = next((part for part in given if all(act.module is not part for act in own)), None)
    if missing is not None:
        raise ConfigError(f"ffn=: {type(block).__name__} does not call its {type(missing).__name__}")
    return Part(ModuleChain(given), tuple(given)) if len(own) == 1 else _line(type(block).__name__, own, own, own)


def _holder(block: nn.Module, acts: Sequence[Act], paths: Sequence[str], attention: Part) -> Act | None:
    """The smallest module that holds all of them and is called as a map, unless it holds attention or begins with a norm."""
    common = paths[0].split(".")[:-1] if len(paths) == 1 else paths[0].split(".")
    for path in paths:
        parts = path.split(".")
        while parts[: len(common)] != common:
            common = common[:-1]
    found = next((act for act in acts if act.path == ".".join(common)), None)
    if found is None or attention.own[0] in set(found.module.modules()) or found.y is None or found.y.shape != found.x.shape:
        return None
    first = next((act for act in _leaves(acts) if act.path.startswith(f"{found.path}.")), None)
    return None if first is not None and first.x is found.x and as_norm(first.module, first.x.shape[-1]) is not None else found


def _line(kind: str, leaves: Sequence[Act], weighty: Sequence[Act], acts: Sequence[Act]) -> Part:
    """The maps one after the other, with what the block computes between them by functions."""
    heads = [act for act in weighty if act.x is weighty[0].x]
    rest = [
        act
        for act in leaves
        if act not in heads and acts.index(act) > acts.index(heads[-1]) and as_norm(act.module, act.x.shape[-1]) is None
    ]
    own = [act.module for act in heads]
    stages: list[nn.Module]
    if len(heads) == 2 and rest:
        gate = _gate(heads[0], heads[1], rest)
        if gate is None:
            raise ConfigError(_between(kind, heads[0], rest[0]))
        stages, y = [gate[0]], rest[gate[1]].x
        rest = rest[gate[1] :]
    else:
        stages, y = [heads[0].module], heads[0].y
    for act in rest:
        if act.x is not y and not _same(act.x, y):
            if not has_matrix(act.module):
                continue  # a leaf of another branch
            name = next((name for name, phi in KNOWN.items() if _same(phi(y), act.x)), None)
            if name is None:
                raise ConfigError(_between(kind, heads[0], act))
            stages.append(Activated(name))
        stages.append(act.module)
        own.append(act.module)
        y = act.y
    return Part(ModuleChain(stages), tuple(own))


def _gate(first: Act, second: Act, rest: Sequence[Act]) -> tuple[GatedUnits, int] | None:
    """phi(first) * second or phi(second) * first, whichever is what a later map acts on, and which one that is."""
    for gate, up in ((first, second), (second, first)):
        for name, phi in KNOWN.items():
            value = phi(gate.y) * up.y
            for i, act in enumerate(rest):
                if _same(value, act.x):
                    return GatedUnits(gate.module, up.module, name), i
    return None


def _between(kind: str, first: Act, then: Act) -> str:
    return (
        f"ffn=: between {first.path} and {then.path} of {kind} stands none of {', '.join(KNOWN)}: put the FFN into a module of its own "
        "and name it by ffn="
    )


def _same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    return float((found - expected).norm()) <= 64 * unit(expected.dtype) * float(expected.norm())


@torch.no_grad()
def token_axis_is_first(block: Running, x: Tensor) -> bool | None:
    """Whether the block's tokens stand along the first axis of its state and not the second; None where neither mixes."""
    y = block(x)

    def moved(axis: int) -> bool:
        changed = x.transpose(0, axis).clone()
        changed[0] = -changed[0] + 1
        found = block(changed.transpose(0, axis))
        return not torch.allclose(found.transpose(0, axis)[1:], y.transpose(0, axis)[1:])

    return False if moved(1) else True if moved(0) else None
