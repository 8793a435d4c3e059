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
    ("attention", "layer_scale1"),
    ("attention", "dropout"),
    ("attention",),
    ("self_attention",),
    ("self_attn",),
    ("attn",),
    ("mixer",),
)
"""Usual paths of attention: modules in the order in which they act. The first row that a block has
completely is used.
"""
FFN_PATHS: tuple[tuple[str, ...], ...] = (
    ("intermediate", "output.dense", "output.dropout"),
    ("mlp", "layer_scale2"),
    ("mlp", "dropout"),
    ("mlp",),
    ("block_sparse_moe",),
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
    names = [field.name for field in dataclasses.fields(Anatomy)]
    for name, value in entries.items():
        if name not in names:
            raise unknown(f"entry of {str(path)!r}", name, names)
        if isinstance(value, list) and name != "blocks":
            is_valid = len(value) > 0 and all(isinstance(part, str) for part in value)
        else:
            is_valid = isinstance(value, str)
        if not is_valid:
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
        missing = []
        if attention is None:
            missing.append("attention")
        if ffn is None:
            missing.append("FFN")
        raise ConfigError(
            f"no {' and '.join(missing)} found in {type(block).__name__}, which has"
            f" {parts_of(block)}: give the paths by anatomy=Anatomy(...), or by --anatomy FILE.toml"
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
    attention = _modules(block, anatomy.attention, ATTENTION_PATHS)
    ffn = _modules(block, anatomy.ffn, FFN_PATHS)
    return attention, ffn


def _modules(
    block: nn.Module,
    named_paths: str | Sequence[str] | None,
    usual_paths: tuple[tuple[str, ...], ...],
) -> list[nn.Module] | None:
    """The modules at the named paths, or at the first row of usual paths that the block has."""
    rows: tuple[tuple[str, ...], ...]
    if named_paths is None:
        rows = usual_paths
    elif isinstance(named_paths, str):
        rows = ((named_paths,),)
    else:
        rows = (tuple(named_paths),)
    parts = dict(block.named_modules())
    for row in rows:
        if all(path in parts for path in row):
            return [parts[path] for path in row]
    return None
