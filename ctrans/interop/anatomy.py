"""Where a model has its blocks, and a block its attention and FFN: paths of attributes, given by
the user or known by name.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ctrans.given_files import check_file
from ctrans.interop.module_chain import ModuleChain
from solvers import ConfigError
from solvers.errors import unknown

ATTENTION_PATHS: tuple[tuple[str, ...], ...] = (
    ("attention.self", "attention.output.dense", "attention.output.dropout"),
    ("attention", "dropout"),
    ("attention",),
    ("self_attn",),
    ("attn",),
)
"""How models name attention: modules in the order in which they act. The first row whose modules a
block has is taken.
"""
FFN_PATHS: tuple[tuple[str, ...], ...] = (
    ("intermediate", "output.dense", "output.dropout"),
    ("mlp", "dropout"),
    ("mlp",),
    ("feed_forward",),
    ("ffn",),
    ("fc1", "activation_fn", "fc2"),
)
"""How models name the FFN, likewise."""


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """Paths of attributes: from the model to its list of blocks, and from a block to the modules
    that are attention and FFN.

    Several modules act one after the other, as BERT's ("intermediate", "output.dense"). What is
    None is found by the names that models are known to use. Norms are not named: they are found by
    what they do.
    """

    blocks: str | None = None
    attention: str | Sequence[str] | None = None
    ffn: str | Sequence[str] | None = None


def read_anatomy(path: Path) -> Anatomy:
    """The anatomy in a TOML file: blocks, attention and ffn, each a path, the last two also lists
    of paths.

    Raises ConfigError for a file that is no such JSON, another name, and a value of another kind.
    """
    check_file(path)
    try:
        entries = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is no TOML: {error}") from None
    known = [field.name for field in dataclasses.fields(Anatomy)]
    for name, value in entries.items():
        if name not in known:
            raise unknown(f"entry of {str(path)!r}", name, known)
        several = isinstance(value, list) and name != "blocks" and all(isinstance(each, str) for each in value) and value
        if not isinstance(value, str) and not several:
            raise ConfigError(f'{str(path)!r}: {name} = {value!r} is no path of attributes, such as "model.layers"')
    return Anatomy(**entries)


def fields(block: nn.Module, anatomy: Anatomy) -> tuple[ModuleChain, ModuleChain]:
    """The block's attention and FFN. Raises ConfigError, listing its parts, where one is not found."""
    attention, ffn = named_maps(block, anatomy)
    if attention is None or ffn is None:
        missing = " and ".join(what for what, found in (("attention", attention), ("FFN", ffn)) if found is None)
        raise ConfigError(
            f"no {missing} found in {type(block).__name__}, which has {parts_of(block)}: name them by anatomy=Anatomy(...), or by "
            "--anatomy FILE.toml"
        )
    return ModuleChain(attention), ModuleChain(ffn)


def parts_of(block: nn.Module) -> str:
    """'norm (LayerNorm), attn (Attention)': the block's own parts."""
    return ", ".join(f"{name} ({type(part).__name__})" for name, part in block.named_children())


def named_maps(block: nn.Module, anatomy: Anatomy) -> tuple[list[nn.Module] | None, list[nn.Module] | None]:
    """The modules of attention and of the FFN at the paths given or known; None for one that has no
    such name.
    """
    return _modules(block, anatomy.attention, ATTENTION_PATHS), _modules(block, anatomy.ffn, FFN_PATHS)


def _modules(block: nn.Module, given: str | Sequence[str] | None, known: tuple[tuple[str, ...], ...]) -> list[nn.Module] | None:
    """The modules at the given paths, or at the first known row of paths that the block has."""
    rows = known if given is None else ((given,) if isinstance(given, str) else tuple(given),)
    parts = dict(block.named_modules())
    return next(([parts[path] for path in row] for row in rows if all(path in parts for path in row)), None)
