"""Which modules of a foreign block are its attention and its FFN, found by what they do while it
runs: no name is needed.

Attention is the smallest module in which a token's output depends on other tokens. Modules that act
on its output alone (dropout, a scale by channel) belong to it. The FFN is the smallest module that
holds the linear maps that act after attention. If the block itself holds these maps, the FFN is
their sequence with the activation or gate between them. A block may have no FFN (Mamba).
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ctrans.interop.anatomy import Anatomy, named_maps, parts_of
from ctrans.interop.block_run import BlockRun, calls_a_norm, leaf_calls, mixing_calls
from ctrans.interop.ffn_in_model import KNOWN, Activated, GatedUnits
from ctrans.interop.module_chain import ModuleChain, has_matrix
from ctrans.interop.multihead import UnfoldedAttention, unfolds
from ctrans.interop.recorded_calls import CalledAs, RecordedCall
from ctrans.interop.tolerances import same
from solvers import ConfigError


@dataclass(frozen=True)
class Part:
    """A map, and the block's modules that it consists of, in the order in which they act."""

    chain: ModuleChain
    modules: tuple[nn.Module, ...]

    @property
    def inside(self) -> set[nn.Module]:
        """The modules of the map and all their submodules."""
        return {part for module in self.modules for part in module.modules()}


@dataclass(frozen=True)
class Parts:
    """The maps of a block.

    - `ffn`: None for a block with one map
    - `context`: keyword arguments of the attention's chain
    - `called`: the module whose recorded call gives this context; None where it is the context of
      the block itself
    """

    attention: Part
    ffn: Part | None
    context: dict[str, Any]
    called: nn.Module | None


def named_parts(run: BlockRun, anatomy: Anatomy) -> Parts | None:
    """The parts at the given or known paths; None unless both are found. Attention gets the
    arguments of the block itself.
    """
    attention, ffn = named_maps(run.block, anatomy)
    if attention is None or ffn is None:
        return None
    return Parts(_part(attention), _part(ffn), run.running.call.context, called=None)


def _part(modules: Sequence[nn.Module]) -> Part:
    """These modules in sequence."""
    return Part(ModuleChain(modules), tuple(modules))


def seen_parts(run: BlockRun, anatomy: Anatomy, *, own_calls: bool) -> Parts:
    """The parts as seen when the block ran; parts that the anatomy names are taken from there.

    With `own_calls`, or without a known name, attention is called as the block called it. Otherwise
    it gets the arguments of the block itself. Raises ConfigError, saying what to pass, if a part is
    not found and for blocks with more or fewer than these two maps.
    """
    named_attention, named_ffn = named_maps(run.block, anatomy)
    for name, path, modules in (
        ("attention", anatomy.attention, named_attention),
        ("FFN", anatomy.ffn, named_ffn),
    ):
        if path is not None and modules is None:
            raise ConfigError(
                f"no {name} found in {run.kind}, which has {parts_of(run.block)}: it has nothing at"
                f" {path!r}"
            )
    called: nn.Module | None
    if own_calls or named_attention is None:
        if anatomy.attention is None:
            attention, context = _attention(run, None)
        else:
            attention, context = _attention(run, named_attention)
        called = attention.modules[0]
    else:
        attention = _part(named_attention)
        context = run.running.call.context
        called = None
    if anatomy.ffn is None or named_ffn is None:
        ffn = _ffn(run, attention)
    else:
        ffn = _named_ffn(run, named_ffn)
    return Parts(attention, ffn, context, called)


def check_roles(run: BlockRun, anatomy: Anatomy) -> None:
    """Raises ConfigError if the module given as attention mixes no tokens and another one does, or
    if the module given as FFN mixes tokens.

    In a block that adds the sum of both, nothing else would show that the two were swapped.
    """
    if anatomy.attention is None and anatomy.ffn is None:
        return
    attention, ffn = (set(modules or ()) for modules in named_maps(run.block, anatomy))
    mixing = mixing_calls(run)
    attention_mixes = _holds_one_of(attention, mixing)
    ffn_mixes = _holds_one_of(ffn, mixing)
    if anatomy.attention is not None and attention and mixing and not attention_mixes:
        if anatomy.ffn is not None and ffn_mixes:
            raise ConfigError(
                f"attention= and ffn= are swapped: in {run.kind} {_path(anatomy.ffn)} mixes tokens"
                f" and {_path(anatomy.attention)} does not; give attention={anatomy.ffn!r},"
                f" ffn={anatomy.attention!r}"
            )
        raise ConfigError(
            f"attention=: {_path(anatomy.attention)} of {run.kind} mixes no tokens, but"
            f" {mixing[0].path} does: give attention={mixing[0].path!r}, or leave it out"
        )
    if anatomy.ffn is not None and ffn_mixes and (not attention_mixes or attention & ffn):
        raise ConfigError(
            f"ffn=: {_path(anatomy.ffn)} of {run.kind} mixes tokens, as attention does: pass it as"
            " attention=, and as ffn= the module that acts on each token alone, or leave both out"
        )


def _holds_one_of(modules: set[nn.Module], calls: Sequence[RecordedCall]) -> bool:
    """Whether the module of one of these calls is one of the modules or inside of them."""
    return any(call.module in module.modules() for call in calls for module in modules)


def _path(named: str | Sequence[str]) -> str:
    if isinstance(named, str):
        return repr(named)
    return " then ".join(map(repr, named))


def _attention(run: BlockRun, named: Sequence[nn.Module] | None) -> tuple[Part, dict[str, Any]]:
    """The attention, at the named modules or found, and the context of its chain: the call."""
    if named is not None:
        named_call = next((call for call in run.calls if call.module is named[0]), None)
        if named_call is None:
            raise ConfigError(f"attention=: {run.kind} does not call its {type(named[0]).__name__}")
        call = named_call
    else:
        mixing = mixing_calls(run)
        if len(mixing) != 1:
            raise ConfigError(_no_attention(run, mixing))
        call = mixing[0]
    if named is not None and len(named) > 1:
        stages = list(named)
    else:
        stages = _extended(call, run)
    tokens_first = run.running.form.tokens_first
    first: nn.Module
    if unfolds(call.module, call.template):
        assert isinstance(call.module, nn.MultiheadAttention), "unfolds has tested this"
        first = UnfoldedAttention(call.module, tokens_first=tokens_first)
    else:
        first = CalledAs(call.module, tokens_first=tokens_first)
    chain = ModuleChain([first, *stages[1:]])
    return Part(chain, tuple(stages)), {"call": call.template.alone(call.x)}


def _no_attention(run: BlockRun, mixing: Sequence[RecordedCall]) -> str:
    if mixing:
        modules = ", ".join(f"{call.path} ({type(call.module).__name__})" for call in mixing)
        return (
            f"attention=: several modules of {run.kind} mix tokens, {modules}: a block must have"
            " one attention and one FFN (no cross-attention, no convolution next to attention);"
            " name one only if the others do nothing"
        )
    return (
        f"no module of {run.kind} mixes tokens, so its own forward does: move attention, from the"
        f" input projections to the output projection, into a module that forward calls; {run.kind}"
        f" has {parts_of(run.block)}"
    )


def _extended(call: RecordedCall, run: BlockRun) -> list[nn.Module]:
    """The called module and each later leaf that acts on its output alone and is no norm."""
    inside = set(call.module.modules())
    y = call.y
    modules = [call.module]
    for later in leaf_calls(run.calls[run.calls.index(call) + 1 :]):
        if later.module not in inside and later.x is y and not calls_a_norm(later):
            modules.append(later.module)
            y = later.y
    return modules


def _ffn(run: BlockRun, attention: Part) -> Part | None:
    """The FFN after this attention; None for a block without one."""
    calls = run.calls
    start = next(i for i, call in enumerate(calls) if call.module is attention.modules[0])
    leaves = [call for call in leaf_calls(calls) if call.module not in attention.inside]
    weighty = [call for call in leaves if has_matrix(call.module) and not calls_a_norm(call)]
    if not weighty:
        return None
    early = next((call for call in weighty if calls.index(call) < start), None)
    if early is not None:
        raise ConfigError(
            f"{early.path} ({type(early.module).__name__}) acts before attention in {run.kind}: a"
            " block must be attention and then an FFN"
        )
    holder = _holder(run, [call.path for call in weighty], attention)
    if holder is not None:
        stages = _extended(holder, run)
        template = holder.template.alone(holder.x)
        first = holder.module
        if template.adds:
            first = CalledAs(holder.module, always=template)
        return Part(ModuleChain([first, *stages[1:]]), tuple(stages))
    return _line(run.kind, leaves, weighty)


def _named_ffn(run: BlockRun, named: Sequence[nn.Module]) -> Part:
    """The named modules in sequence, with the functions that the block applies between them."""
    calls = [call for call in run.calls if call.module in named]
    for module in named:
        if all(call.module is not module for call in calls):
            raise ConfigError(f"ffn=: {run.kind} does not call its {type(module).__name__}")
    if len(calls) == 1:
        return _part(named)
    return _line(run.kind, calls, calls)


def _holder(run: BlockRun, paths: Sequence[str], attention: Part) -> RecordedCall | None:
    """The smallest module that holds all these paths and is called as a map; None if it holds
    attention or begins with a norm.
    """
    if len(paths) > 1:
        parent = posixpath.commonpath([path.replace(".", "/") for path in paths]).replace("/", ".")
    else:
        parent = paths[0].rpartition(".")[0]
    holder = next((call for call in run.calls if call.path == parent), None)
    if holder is None or attention.modules[0] in set(holder.module.modules()):
        return None
    if holder.y is None or holder.y.shape != holder.x.shape:
        return None
    leaves_inside = [call for call in leaf_calls(run.calls) if call.path.startswith(f"{parent}.")]
    if leaves_inside:
        first = leaves_inside[0]
        if first.x is holder.x and calls_a_norm(first):
            return None
    return holder


def _line(kind: str, leaves: Sequence[RecordedCall], weighty: Sequence[RecordedCall]) -> Part:
    """The maps in sequence, with the functions that the block applies between them."""
    heads = [call for call in weighty if call.x is weighty[0].x]
    behind = leaves[leaves.index(heads[-1]) + 1 :]
    later = [call for call in behind if call not in heads and not calls_a_norm(call)]
    modules = [call.module for call in heads]
    stages: list[nn.Module]
    if len(heads) == 2 and later:
        gate = _gate(heads[0], heads[1], later)
        if gate is None:
            raise ConfigError(_between(kind, heads[0], later[0]))
        units, index = gate
        stages = [units]
        y = later[index].x
        later = later[index:]
    else:
        stages = [heads[0].module]
        y = heads[0].y
    for call in later:
        if call.x is not y and not same(call.x, y):
            if not has_matrix(call.module):
                continue  # a leaf of another branch
            name = _activation(y, call.x)
            if name is None:
                raise ConfigError(_between(kind, heads[0], call))
            stages.append(Activated(name))
        stages.append(call.module)
        modules.append(call.module)
        y = call.y
    return Part(ModuleChain(stages), tuple(modules))


def _activation(y: Tensor, x: Tensor) -> str | None:
    """The name of the activation phi with phi(y) = x."""
    for name, phi in KNOWN.items():
        if same(phi(y), x):
            return name
    return None


def _gate(
    first: RecordedCall, second: RecordedCall, later: Sequence[RecordedCall]
) -> tuple[GatedUnits, int] | None:
    """phi(first) * second or phi(second) * first, whichever is the input of a later map; and the
    index of that map.
    """
    for gate, up in ((first, second), (second, first)):
        for name, phi in KNOWN.items():
            value = phi(gate.y) * up.y
            for i, call in enumerate(later):
                if same(value, call.x):
                    return GatedUnits(gate.module, up.module, name), i
    return None


def _between(kind: str, first: RecordedCall, then: RecordedCall) -> str:
    return (
        f"ffn=: between {first.path} and {then.path} of {kind} acts none of {', '.join(KNOWN)}: put"
        " the FFN into its own module and pass its path as ffn=. A block with a third map, such as"
        " cross-attention, is not read"
    )
