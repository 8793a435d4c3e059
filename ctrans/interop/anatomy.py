"""Paths of attributes to a model's blocks, and from a block to its attention and FFN: given by the
user or known by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ctrans.base.given_files import read_toml
from ctrans.interop.module_chain import ModuleChain
from solvers import ConfigError, shown, unknown

ATTENTION_PATHS: tuple[tuple[str, ...], ...] = (
    ("attention.self", "attention.output.dense", "attention.output.dropout"),
    ("attention", "dropout"),
    ("attention",),
    ("self_attn",),
    ("attn",),
)
"""Usual paths of attention: modules in the order in which they act. The first row that a block has
completely is used.
"""
FFN_PATHS: tuple[tuple[str, ...], ...] = (
    ("intermediate", "output.dense", "output.dropout"),
    ("mlp", "dropout"),
    ("mlp",),
    ("feed_forward",),
    ("ffn",),
    ("fc1", "activation_fn", "fc2"),
)
"""Usual paths of the FFN, as `ATTENTION_PATHS`."""


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """Paths of attributes: from the model to its list of blocks, and from a block to the modules of
    attention and FFN.

    Several modules act in sequence, such as BERT's ("intermediate", "output.dense"). None means
    that the usual names are searched. Norms need no path: they are found by what they compute.
    """

    blocks: str | None = None
    attention: str | Sequence[str] | None = None
    ffn: str | Sequence[str] | None = None


def read_anatomy(path: Path) -> Anatomy:
    """The anatomy in a TOML file: blocks, attention and ffn, each a path; attention and ffn may be
    lists of paths.

    Raises ConfigError for a file that is not TOML, an unknown name, and a value of the wrong type.
    """
    entries = read_toml(path)
    known = [field.name for field in dataclasses.fields(Anatomy)]
    for name, value in entries.items():
        if name not in known:
            raise unknown(f"entry of {str(path)!r}", name, known)
        several = (
            isinstance(value, list)
            and name != "blocks"
            and all(isinstance(each, str) for each in value)
            and value
        )
        if not isinstance(value, str) and not several:
            raise ConfigError(
                f"{str(path)!r}: {name} = {shown(value)} is no path of attributes: give one such as"
                ' "model.layers"'
            )
    return Anatomy(**entries)


def fields(block: nn.Module, anatomy: Anatomy) -> tuple[ModuleChain, ModuleChain]:
    """The block's attention and FFN. Raises ConfigError, listing the block's parts, if one is not
    found.
    """
    attention, ffn = named_maps(block, anatomy)
    if attention is None or ffn is None:
        missing = " and ".join(
            what for what, found in (("attention", attention), ("FFN", ffn)) if found is None
        )
        raise ConfigError(
            f"no {missing} found in {type(block).__name__}, which has {parts_of(block)}: give the"
            " paths by anatomy=Anatomy(...), or by --anatomy FILE.toml"
        )
    return ModuleChain(attention), ModuleChain(ffn)


def parts_of(block: nn.Module) -> str:
    """The block's direct submodules, as 'norm (LayerNorm), attn (Attention)'."""
    return ", ".join(f"{name} ({type(part).__name__})" for name, part in block.named_children())


def named_maps(
    block: nn.Module, anatomy: Anatomy
) -> tuple[list[nn.Module] | None, list[nn.Module] | None]:
    """The modules of attention and of the FFN at the given or usual paths; None for a map that is
    not found.
    """
    return _modules(block, anatomy.attention, ATTENTION_PATHS), _modules(
        block, anatomy.ffn, FFN_PATHS
    )


def _modules(
    block: nn.Module, given: str | Sequence[str] | None, known: tuple[tuple[str, ...], ...]
) -> list[nn.Module] | None:
    """The modules at the given paths, or at the first row of usual paths that the block has."""
    if given is None:
        rows = known
    else:
        rows = ((given,) if isinstance(given, str) else tuple(given),)
    parts = dict(block.named_modules())
    return next(
        ([parts[path] for path in row] for row in rows if all(path in parts for path in row)), None
    )
