"""Where a model has its blocks, and a block its attention and FFN: paths of attributes, found by name or given by the user."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
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
"""How models name attention: modules in the order in which they act. The first row whose modules a block has is taken."""
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
    """Paths of attributes: from the model to its list of blocks, and from a block to the modules that are attention and FFN.

    Several modules act one after the other, as BERT's ("intermediate", "output.dense"). What is None is found by the names that
    models are known to use. Norms are not named: they are found by what they do.
    """

    blocks: str | None = None
    attention: str | Sequence[str] | None = None
    ffn: str | Sequence[str] | None = None


def read_anatomy(path: Path) -> Anatomy:
    """The anatomy in a TOML file: blocks, attention and ffn, each a path, the last two also lists of paths.

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


def find_blocks(model: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """The model's blocks. Raises ConfigError, listing what was found, unless exactly one list of blocks fits."""
    lists = lists_of_modules(model)
    if anatomy.blocks is not None:
        if anatomy.blocks not in lists:
            raise ConfigError(f"the model has no list of modules {anatomy.blocks!r}: it has {described(lists)}")
        return list(lists[anatomy.blocks])
    maps = {name: [named_maps(block, anatomy) for block in part] for name, part in lists.items()}
    fitting = {name: lists[name] for name, each in maps.items() if all(None not in pair for pair in each)}
    if not fitting:  # the FFN can be seen when the block runs
        fitting = {name: lists[name] for name, each in maps.items() if all(attention is not None for attention, _ in each)}
    if len(fitting) != 1:
        found = "several lists" if fitting else "no list"
        raise ConfigError(
            f"{type(model).__name__} has {found} of blocks with an attention and an FFN of a known name; its lists are "
            f"{described(lists)}: name them by anatomy=Anatomy(blocks=..., attention=..., ffn=...), or by --anatomy FILE.toml"
        )
    return list(next(iter(fitting.values())))


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
    """The modules of attention and of the FFN at the paths given or known; None for one that has no such name."""
    return _modules(block, anatomy.attention, ATTENTION_PATHS), _modules(block, anatomy.ffn, FFN_PATHS)


def lists_of_modules(model: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    """What may hold blocks, by its path."""
    return {name: part for name, part in model.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part)}


def _modules(block: nn.Module, given: str | Sequence[str] | None, known: tuple[tuple[str, ...], ...]) -> list[nn.Module] | None:
    """The modules at the given paths, or at the first known row of paths that the block has."""
    rows = known if given is None else ((given,) if isinstance(given, str) else tuple(given),)
    parts = dict(block.named_modules())
    return next(([parts[path] for path in row] for row in rows if all(path in parts for path in row)), None)


def described(lists: Mapping[str, nn.ModuleList | nn.Sequential]) -> str:
    """'layers: 2 Layer (norm, body)', for each list."""
    each = []
    for name, part in lists.items():
        children = ", ".join(child for child, _ in part[0].named_children())
        each.append(f"{name}: {len(part)} {type(part[0]).__name__} ({children})")
    return "; ".join(each) or "none"
