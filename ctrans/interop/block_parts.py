"""Which modules of a foreign block are its attention and its FFN, by name. A block may have no FFN
(Mamba).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ctrans.interop.anatomy import Anatomy, named_maps, parts_of
from ctrans.interop.block_run import BlockRun, mixing_calls
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.recorded_calls import RecordedCall
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
    """The maps of a block. `ffn` is None for a block with one map."""

    attention: Part
    ffn: Part | None


def named_parts(run: BlockRun, anatomy: Anatomy) -> Parts:
    """The parts at the given or usual paths. A block without an FFN has one map. Raises ConfigError
    for other blocks.
    """
    attention, ffn = named_maps(run.block, anatomy)
    for name, path, modules in (
        ("attention", anatomy.attention, attention),
        ("FFN", anatomy.ffn, ffn),
    ):
        if path is not None and modules is None:
            raise ConfigError(
                f"no {name} found in {run.kind}, which has {parts_of(run.block)}: it has nothing at"
                f" {path!r}"
            )
    if attention is None:
        raise ConfigError(
            f"{run.kind} has no attention of a usual name: it has {parts_of(run.block)}"
        )
    if ffn is None:
        return Parts(_part(attention), None)
    return Parts(_part(attention), _part(ffn))


def _part(modules: Sequence[nn.Module]) -> Part:
    """These modules in sequence."""
    return Part(ModuleChain(modules), tuple(modules))


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
