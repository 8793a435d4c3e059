"""Where a model has its blocks, and a block its attention and FFN: paths of attributes, found by name or given by the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from ctrans.interop.module_chain import ModuleChain
from solvers import ConfigError

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


def find_blocks(model: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """The model's blocks. Raises ConfigError, listing what was found, unless exactly one list of blocks fits."""
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part)}
    if anatomy.blocks is not None:
        if anatomy.blocks not in lists:
            raise ConfigError(f"the model has no list of modules {anatomy.blocks!r}: it has {_described(lists)}")
        return list(lists[anatomy.blocks])
    fitting = {
        name: part
        for name, part in lists.items()
        if all(_modules(block, anatomy.attention, ATTENTION_PATHS) and _modules(block, anatomy.ffn, FFN_PATHS) for block in part)
    }
    if len(fitting) != 1:
        found = "several lists" if fitting else "no list"
        raise ConfigError(
            f"{type(model).__name__} has {found} of blocks with an attention and an FFN of a known name; its lists are "
            f"{_described(lists)}: name them by anatomy=Anatomy(blocks=..., attention=..., ffn=...)"
        )
    return list(next(iter(fitting.values())))


def fields(block: nn.Module, anatomy: Anatomy) -> tuple[ModuleChain, ModuleChain]:
    """The block's attention and FFN. Raises ConfigError, listing its parts, where one is not found."""
    attention = _modules(block, anatomy.attention, ATTENTION_PATHS)
    ffn = _modules(block, anatomy.ffn, FFN_PATHS)
    if attention is None or ffn is None:
        missing = " and ".join(what for what, found in (("attention", attention), ("FFN", ffn)) if found is None)
        parts = ", ".join(f"{name} ({type(part).__name__})" for name, part in block.named_children())
        raise ConfigError(f"no {missing} found in {type(block).__name__}, which has {parts}: name them by anatomy=Anatomy(...)")
    return ModuleChain(attention), ModuleChain(ffn)


def _modules(block: nn.Module, given: str | Sequence[str] | None, known: tuple[tuple[str, ...], ...]) -> list[nn.Module] | None:
    """The modules at the given paths, or at the first known row of paths that the block has."""
    rows = known if given is None else ((given,) if isinstance(given, str) else tuple(given),)
    parts = dict(block.named_modules())
    return next(([parts[path] for path in row] for row in rows if all(path in parts for path in row)), None)


def _described(lists: dict[str, nn.ModuleList]) -> str:
    """'layers: 2 Layer (norm, body)', for each list."""
    each = []
    for name, part in lists.items():
        children = ", ".join(child for child, _ in part[0].named_children())
        each.append(f"{name}: {len(part)} {type(part[0]).__name__} ({children})")
    return "; ".join(each) or "none"
