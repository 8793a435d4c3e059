"""Where the monitor puts its hooks: the modules of the user's model that get the state of a
sublayer and return its velocity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import Balances
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.map_outputs import MapOutput, map_outputs, router_in
from ctrans.interop.model_adapter import tensor_in
from ctrans.interop.open_model import open_model, unwrap_model
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.measure.walk import Model
from solvers import ConfigError


@dataclass(frozen=True, eq=False)
class Site:
    """The modules of sublayer k.

    - `enter`: gets the state X
    - `exits`: the sum of their outputs is the raw velocity r. Parallel attention and FFN have two
    - `attention`: computes the scores; None without attention
    - `router`: chooses experts, or is a map that knows its load; None without experts
    - `length`: h in the step X + h r

    A model that is read by its sums has no such modules.
    """

    k: int
    block: int
    length: float
    sublayer: Sublayer
    enter: nn.Module | None = None
    exits: tuple[MapOutput, ...] = ()
    state_norm: nn.Module | None = None
    attention: nn.Module | None = None
    router: nn.Module | None = None

    @property
    def place(self) -> str:
        """'block 3, attention'."""
        return f"block {self.block}, {self.sublayer.kind}"


@dataclass(frozen=True, eq=False)
class Sites:
    """A model that trains.

    - `root`: the user's module
    - `model`: the same model as ctrans opens it, with the modules of the root
    - `vocabulary`: the number of tokens, 0 for a model without
    - `said`: the model in one line
    - `own`: whether the root is a model of ctrans
    - `stream`: what sees the states of a model that is read by its sums
    """

    root: nn.Module
    model: Model
    sites: tuple[Site, ...]
    vocabulary: int
    said: str
    own: bool = False
    stream: StreamAdapter | None = None

    def logits(self, output: Any) -> Tensor | None:
        """The logits (*batch, tokens, vocabulary) in an output of the root, or None."""
        output = (
            output[0]
            if isinstance(output, tuple) and output and isinstance(output[0], Tensor)
            else tensor_in(output)
        )
        fits = (
            isinstance(output, Tensor)
            and output.dim() > 2
            and self.vocabulary
            and output.shape[-1] == self.vocabulary
        )
        return output if fits else None


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it was compiled by torch.compile."""
    parts = [*model.modules(), *unwrap_model(model).modules()]
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in parts
    )


def sites_of(model: nn.Module, **opening: Any) -> Sites:
    """The sites of a model of ctrans, or of a model that `open_model(model, **opening)` opens.

    Raises ConfigError for a model that cannot be opened, or whose weights are sharded.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"cannot watch a {type(model).__name__}: give the nn.Module that trains")
    root = unwrap_model(model)
    if isinstance(getattr(root, "depth", None), Depth) and isinstance(root, Model):
        if opening:
            raise ConfigError(
                f"{', '.join(opening)}: a {type(root).__name__} is a model of ctrans and needs no"
                " such options; leave them out"
            )
        vocabulary = int(getattr(getattr(root, "config", None), "vocab_size", 0) or 0)
        return Sites(
            root, root, _own_sites(root, root.depth), vocabulary, type(root).__name__, own=True
        )
    if any(hasattr(parameter, "full_tensor") for parameter in root.parameters()):
        raise ConfigError(
            "the model's weights are sharded already: make the Monitor first, then shard the model"
        )
    opened = open_model(root, **opening)
    adapter = getattr(opened.depth.sublayers[0].field, "adapter", None)
    if isinstance(adapter, StreamAdapter):
        stream = adapter
    else:
        stream = None
    sites = _own_sites(root, opened.depth, by_modules=stream is None)
    return Sites(
        root, opened, sites, opened.vocabulary, opened.described.split(";")[0], stream=stream
    )


def first_quarter(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments of a model, with the first quarter of its sequences: of each tensor that
    has as many rows as the first one.
    """
    args = (
        ()
        if isinstance(batch, Mapping)
        else tuple(batch)
        if isinstance(batch, (tuple, list))
        else (batch,)
    )
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    else:
        kwargs = {}
    count = next(
        (
            len(each)
            for each in (*args, *kwargs.values())
            if isinstance(each, Tensor) and each.dim()
        ),
        0,
    )

    def cut(each: Any) -> Any:
        fits = isinstance(each, Tensor) and each.dim() > 0 and len(each) == count
        if fits:
            return each[: max(1, count // 4)]
        return each

    return tuple(map(cut, args)), {name: cut(each) for name, each in kwargs.items()}


def own_parameters(sites: Sites) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """The parameters of each sublayer that the root still has, and those outside of the depth. Do
    not keep them: sharding replaces parameters.
    """
    all_of_root = {id(parameter): parameter for parameter in sites.root.parameters()}
    inside = [
        [p for p in site.sublayer.parameters() if id(p) in all_of_root] for site in sites.sites
    ]
    known = {id(parameter) for each in inside for parameter in each}
    return inside, [parameter for key, parameter in all_of_root.items() if key not in known]


def _own_sites(root: nn.Module, depth: Depth, *, by_modules: bool = True) -> tuple[Site, ...]:
    found = []
    own = set(root.modules())
    for k, (sublayer, length) in enumerate(zip(depth.sublayers, depth.lengths, strict=True)):
        if sublayer in own:
            made = _ours(sublayer)
        elif by_modules:
            made = _theirs(sublayer, own)
        else:
            made = {}
        found.append(Site(k, k // depth.per_block, length, sublayer, **made))
    return tuple(found)


def _ours(sublayer: Sublayer) -> Mapping[str, Any]:
    branch = sublayer.attention
    return {
        "enter": sublayer,
        "exits": (MapOutput(sublayer),),
        "state_norm": sublayer.state_norm,
        "attention": None if branch is None else branch.field,
        "router": next(
            (each.field for each in sublayer.branches.values() if isinstance(each.field, Balances)),
            None,
        ),
    }


def _theirs(sublayer: Sublayer, own: set[nn.Module]) -> Mapping[str, Any]:
    """The modules of another library in a sublayer: its norms and maps, in the order in which they
    act.
    """
    branches = sublayer.branches
    maps = [map_outputs(branch.field, own) for branch in branches.values()]
    if not all(maps):
        raise ConfigError(
            "cannot watch this model: the monitor needs blocks that call attention and FFN as"
            " modules"
        )
    before, behind, state_norm = (
        getattr(getattr(sublayer, role), "module", None)
        for role in ("input_norm", "output_norm", "state_norm")
    )
    mixes = "attention" in branches
    return {
        "enter": before or maps[0][0].module,
        "exits": tuple(each[-1] for each in maps) if behind is None else (MapOutput(behind),),
        "state_norm": state_norm,
        "attention": maps[0][0].module if mixes else None,
        "router": router_in([each[0].module for each in maps[mixes:]]),
    }
