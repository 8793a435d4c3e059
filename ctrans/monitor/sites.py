"""Where a training is looked at: the user's own modules in which a sublayer's state comes in and
its velocity goes out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.fields import Balances, Kind
from ctrans.interop import open_model
from ctrans.interop.map_outputs import MapOutput, map_outputs, router_in
from ctrans.interop.model_adapter import tensor_in
from ctrans.interop.open_model import unwrap_model
from ctrans.sublayer import Sublayer
from ctrans.walk import Model
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """Sublayer k of a model that trains: X comes into `enter`, and r is the sum of what leaves by
    `exits`, its raw velocity.

    There are two exits where attention and FFN act at once and the model adds them. `attention` is
    the module in which scores are computed, None where there is none; `router` the one that chooses
    experts, or that says how many tokens go to each. `length` is h in the step X + h r.
    """

    k: int
    kind: Kind
    block: int
    length: float
    sublayer: Sublayer
    enter: nn.Module
    exits: tuple[MapOutput, ...]
    state_norm: nn.Module | None
    attention: nn.Module | None
    router: nn.Module | None

    @property
    def place(self) -> str:
        """'block 3, attention'."""
        return f"block {self.block}, {self.kind}"


@dataclasses.dataclass(frozen=True, eq=False)
class Sites:
    """A model that trains: `root` is the user's own module, `model` the same as instruments look at
    it, whose modules are the user's.

    `logits(output)` finds the logits (*batch, tokens, vocabulary) in what the root returns, None
    where there are none. `vocabulary` is 0 where the model reads no tokens. `said` is what was
    recognised, in a line.
    """

    root: nn.Module
    model: Model
    sites: tuple[Site, ...]
    vocabulary: int
    said: str
    own: bool = False
    """Whether the root is a model of ctrans itself."""

    @property
    def depth(self) -> Depth:
        return self.model.depth

    def logits(self, output: Any) -> Tensor | None:
        output = output[0] if isinstance(output, tuple) and output and isinstance(output[0], Tensor) else tensor_in(output)
        fits = isinstance(output, Tensor) and output.dim() > 2 and self.vocabulary and output.shape[-1] == self.vocabulary
        return output if fits else None


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was asked of it, or of a part of it."""
    parts = [*model.modules(), *unwrap_model(model).modules()]
    return any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in parts)


def sites_of(model: nn.Module, **opening: Any) -> Sites:
    """The sites of a model of ctrans, or of any that `open_model` opens, whose options `opening`
    are.

    The model is read in evaluation mode and is afterwards as it was: modes, gradients asked for,
    random numbers. Raises ConfigError for what cannot be opened, in `open_model`'s words, and for a
    model whose weights are elsewhere (sharded before it came here).
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a {type(model).__name__} does not train: give the nn.Module that does")
    root = unwrap_model(model)
    if isinstance(getattr(root, "depth", None), Depth) and isinstance(root, Model):
        if opening:
            raise ConfigError(f"{', '.join(opening)}: a {type(root).__name__} is a model of ctrans as it is, leave this out")
        vocabulary = int(getattr(getattr(root, "config", None), "vocab_size", 0) or 0)
        return Sites(root, root, _own_sites(root.depth, set(root.modules())), vocabulary, type(root).__name__, own=True)
    if any(hasattr(parameter, "full_tensor") for parameter in root.parameters()):
        raise ConfigError("the model's weights are sharded already: make the Monitor first, then shard the model")
    with as_it_was(root):
        opened = open_model(root, **opening)
    return Sites(root, opened, _own_sites(opened.depth, set(root.modules())), opened.vocabulary, opened.described.split(";")[0])


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's modes, the gradients it asks for and all random numbers are as before."""
    modes = [(part, part.training) for part in model.modules()]
    asks = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for part, training in modes:
            part.training = training
        for parameter, required in asks:
            parameter.requires_grad_(required)


def first_quarter(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments of a model, with the first quarter of its sequences: of each tensor that
    has as many rows as the first one.
    """
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    count = next((len(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), 0)

    def cut(each: Any) -> Any:
        fits = isinstance(each, Tensor) and each.dim() > 0 and len(each) == count
        return each[: max(1, count // 4)] if fits else each

    return tuple(map(cut, args)), {name: cut(each) for name, each in kwargs.items()}


def own_parameters(sites: Sites) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """The parameters of every sublayer, and those outside of the depth. Found anew each time:
    sharding replaces them.
    """
    inside = [list(site.sublayer.parameters()) for site in sites.sites]
    known = {id(parameter) for each in inside for parameter in each}
    return inside, [parameter for parameter in sites.root.parameters() if id(parameter) not in known]


def dropped(sublayer: Sublayer) -> float:
    """By how much dropout can make what leaves the sublayer's map larger: the product of 1/(1 - p)
    of all that drop in it.

    Modules that drop, and numbers of modules that say so by their names (`attention_dropout`,
    `drop_prob`), while they train.
    """
    factor = 1.0
    for part in sublayer.field.modules():
        if part.training:
            named = {name: value for name, value in vars(part).items() if "drop" in name and isinstance(value, float)}
            shares = [part.p, *named.values()] if isinstance(part, nn.modules.dropout._DropoutNd) else [*named.values()]
            for share in shares:
                factor *= 1 / (1 - share) if 0 <= share < 1 else math.inf
    return factor


def _own_sites(depth: Depth, own: set[nn.Module]) -> tuple[Site, ...]:
    found = []
    for k, (sublayer, length) in enumerate(zip(depth.sublayers, depth.lengths, strict=True)):
        made = _ours(sublayer) if sublayer in own else _theirs(sublayer, own)
        found.append(Site(k, sublayer.kind, k // depth.per_block, length, sublayer, **made))
    return tuple(found)


def _ours(sublayer: Sublayer) -> Mapping[str, Any]:
    branch = sublayer.attention
    return {
        "enter": sublayer,
        "exits": (MapOutput(sublayer),),
        "state_norm": sublayer.state_norm,
        "attention": None if branch is None else branch.field,
        "router": next((each.field for each in sublayer.branches.values() if isinstance(each.field, Balances)), None),
    }


def _theirs(sublayer: Sublayer, own: set[nn.Module]) -> Mapping[str, Any]:
    """By the modules of another library within our sublayer: its norms' and its maps', in the order
    in which they act.
    """
    branches = sublayer.branches
    maps = [map_outputs(getattr(branch.field, "attention", branch.field), own) for branch in branches.values()]
    if not all(maps):
        raise ConfigError(f"no module of the model was found in its {sublayer.kind}: its functions alone cannot be watched")
    norms = {role: None if norm is None else norm.module for role, norm in _norms(sublayer).items()}
    behind = norms["output_norm"]
    mixes = "attention" in branches
    return {
        "enter": norms["input_norm"] or maps[0][0].module,
        "exits": tuple(each[-1] for each in maps) if behind is None else (MapOutput(behind),),
        "state_norm": norms["state_norm"],
        "attention": maps[0][0].module if mixes else None,
        "router": router_in([each[0].module for each in maps[mixes:]]),
    }


def _norms(sublayer: Sublayer) -> dict[str, Any]:
    return {role: getattr(sublayer, role) for role in ("input_norm", "output_norm", "state_norm")}
