"""Where a model has its blocks, and a block its attention and FFN: paths of attributes, found by name or given by the user."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

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


@runtime_checkable
class TransposedLinear(Protocol):
    """A linear map that keeps its weight as (in, out): GPT-2's `Conv1D`."""

    nx: int
    nf: int


class Chain(nn.Module):
    """f(x) = stage_k(.. stage_1(x, **context)), the first output of stages that return several (attention with its weights).

    Once `find_last` has seen it act, f(x) = last(features(x)) for its last linear map.
    """

    def __init__(self, stages: Sequence[nn.Module]):
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.ending: str | None = None

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        first, *others = self.stages
        x = _first(first(x, **context))
        for stage in others:
            x = _first(stage(x))
        return x

    @property
    def last(self) -> nn.Linear:
        """The linear map that acts last, sharing the model's weight. Raises ConfigError where something else does."""
        linear: Any = self.get_submodule(self._ending())
        return _as_linear(linear) if isinstance(linear, TransposedLinear) else linear

    def features(self, x: Tensor, **context: Any) -> Tensor:
        """What the last linear map is applied to. Raises ConfigError as `last` does."""
        with _acting({self._ending(): self.get_submodule(self._ending())}) as seen:
            self(x, **context)
        return seen[-1][1]

    def find_last(self, x: Tensor, **context: Any) -> None:
        """Runs f once, without dropout, to see which linear map gives its output."""
        with _acting({name: part for name, part in self.named_modules() if is_linear(part)}) as seen:
            output = self(x, **context)
        self.ending = seen[-1][0] if seen and torch.equal(seen[-1][2], output) else None

    def _ending(self) -> str:
        if self.ending is None:
            names = " then ".join(type(stage).__name__ for stage in self.stages)
            raise ConfigError(
                f"{names} does not end in one linear map, as experts and gates after it do not: it has no last weights"
            )
        return self.ending


def is_linear(module: nn.Module) -> bool:
    """Whether it computes W x + b by a weight of its own."""
    return isinstance(module, (nn.Linear, TransposedLinear))


def _as_linear(module: Any) -> nn.Linear:
    """The same map as torch has it: its weight and bias are views, so that what changes one changes both."""
    linear = nn.Linear(module.nx, module.nf, bias=False, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T, requires_grad=module.weight.requires_grad)
    linear.bias = nn.Parameter(module.bias.detach(), requires_grad=module.bias.requires_grad)
    return linear


@contextlib.contextmanager
def _acting(parts: dict[str, nn.Module]) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Inside, notes which of the parts act, in order, with what goes in and what comes out."""
    seen: list[tuple[str, Tensor, Tensor]] = []
    handles = [
        part.register_forward_hook(lambda _, args, output, name=name: seen.append((name, args[0], output)))
        for name, part in parts.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


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


def fields(block: nn.Module, anatomy: Anatomy) -> tuple[Chain, Chain]:
    """The block's attention and FFN. Raises ConfigError, listing its parts, where one is not found."""
    attention = _modules(block, anatomy.attention, ATTENTION_PATHS)
    ffn = _modules(block, anatomy.ffn, FFN_PATHS)
    if attention is None or ffn is None:
        missing = " and ".join(what for what, found in (("attention", attention), ("FFN", ffn)) if found is None)
        parts = ", ".join(f"{name} ({type(part).__name__})" for name, part in block.named_children())
        raise ConfigError(f"no {missing} found in {type(block).__name__}, which has {parts}: name them by anatomy=Anatomy(...)")
    return Chain(attention), Chain(ffn)


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
