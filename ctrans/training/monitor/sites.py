"""Where the monitor puts its hooks: the modules of the user's model that get the state of a
sublayer and return its velocity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import Balances
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.map_outputs import MapOutput, map_outputs, router_in
from ctrans.interop.model_adapter import tensor_in
from ctrans.interop.module_chain import has_matrix
from ctrans.interop.open_model import check_model, open_model, unwrap_model
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.measure.walk import Model
from solvers import ConfigError

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules that hold lists of blocks."""


@dataclass(frozen=True, eq=False)
class Site:
    """The modules of sublayer k.

    - `enter`: gets the state X
    - `exits`: the sum of their outputs is the raw velocity r. Parallel attention and FFN have two
    - `attention`: computes the scores; None without attention
    - `router`: chooses experts, or is a map that knows its load; None without experts
    - `length`: h in the step X + h r, as it was when the model was opened
    - `may_learn_length`: whether a weight may be that length. Then passes fit it
    - `block_module`: the module of the block that ends here and returns X + h r, for such a last
      sublayer
    - `unit`: what the block is called

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
    may_learn_length: bool = False
    block_module: nn.Module | None = None
    unit: str = "block"

    @property
    def place(self) -> str:
        """'block 3, attention'."""
        return f"{self.unit} {self.block}, {self.sublayer.kind}"


@dataclass(frozen=True, eq=False)
class Sites:
    """A model that trains.

    - `root`: the user's module
    - `model`: the same model as ctrans opens it, with the modules of the root
    - `by_depth`: its sites, one for each sublayer
    - `vocabulary`: the number of tokens, 0 for a model without
    - `description`: the model in one line
    - `of_ctrans`: whether the root is a model of ctrans
    - `stream`: what sees the states of a model that is read by its sums
    """

    root: nn.Module
    model: Model
    by_depth: tuple[Site, ...]
    vocabulary: int
    description: str
    of_ctrans: bool = False
    stream: StreamAdapter | None = None

    def logits(self, output: Any) -> Tensor | None:
        """The logits (*batch, tokens, vocabulary) in an output of the root, or None."""
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            logits: Tensor | None = output[0]
        else:
            logits = tensor_in(output)
        if logits is None or logits.dim() <= 2 or not self.vocabulary:
            return None
        if logits.shape[-1] != self.vocabulary:
            return None
        return logits


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
    check_model(model)
    root = unwrap_model(model)
    if isinstance(getattr(root, "depth", None), Depth) and isinstance(root, Model):
        if opening:
            raise ConfigError(
                f"{', '.join(opening)}: a {type(root).__name__} is a model of ctrans and needs no"
                " such options; leave them out"
            )
        config = getattr(root, "config", None)
        vocabulary = int(getattr(config, "vocab_size", 0) or 0)
        sites = _sites_in(root, root.depth)
        return Sites(root, root, sites, vocabulary, type(root).__name__, of_ctrans=True)
    if any(hasattr(parameter, "full_tensor") for parameter in root.parameters()):
        raise ConfigError(
            "the model's weights are sharded already: make the Monitor first, then shard the model"
        )
    opened = open_model(root, **opening)
    stream = None
    blocks: list[nn.Module] = []
    if opened.imported is not None:
        adapter = opened.imported.adapter
        if isinstance(adapter, StreamAdapter):
            stream = adapter
        else:
            blocks = adapter.blocks()
    sites = _sites_in(root, opened.depth, blocks, by_modules=stream is None)
    description = opened.described.split(";")[0]
    return Sites(root, opened, sites, opened.vocabulary, description, stream=stream)


def first_quarter(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments of a model, with the first quarter of its sequences: of each tensor that
    has as many rows as the first one.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    elif isinstance(batch, (tuple, list)):
        args = tuple(batch)
    else:
        args = (batch,)
    lengths = [
        len(argument)
        for argument in (*args, *kwargs.values())
        if isinstance(argument, Tensor) and argument.dim()
    ]

    def cut(argument: Any) -> Any:
        if isinstance(argument, Tensor) and argument.dim() and len(argument) == lengths[0]:
            return argument[: max(1, lengths[0] // 4)]
        return argument

    return tuple(map(cut, args)), {name: cut(argument) for name, argument in kwargs.items()}


def own_parameters(sites: Sites) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """The parameters of each sublayer that the root still has, and those outside of the depth. Do
    not keep them: sharding replaces parameters.
    """
    all_of_root = {id(parameter): parameter for parameter in sites.root.parameters()}
    inside = [
        [p for p in site.sublayer.parameters() if id(p) in all_of_root] for site in sites.by_depth
    ]
    ids_inside = {id(parameter) for group in inside for parameter in group}
    return inside, [parameter for key, parameter in all_of_root.items() if key not in ids_inside]


def unwatched_blocks(sites: Sites) -> list[str]:
    """Lists of blocks of the root that no sublayer has a weight of, as 'encoder.layers (6 of 6
    EncoderLayer)': the encoder beside a watched decoder, or the other way round.
    """
    inside, _ = own_parameters(sites)
    watched = {id(parameter) for group in inside for parameter in group}
    described: list[str] = []
    last_path = ""
    for path, part in sites.root.named_modules():
        if not isinstance(part, CONTAINERS):
            continue
        if last_path and path.startswith(f"{last_path}."):
            continue  # a list inside of such blocks
        blocks = list(part.children())
        others = [block for block in blocks if _is_other_block(block, watched)]
        if others:
            kind = type(others[0]).__name__
            described.append(f"{path} ({len(others)} of {len(blocks)} {kind})")
            last_path = path
    return described


def _is_other_block(block: nn.Module, watched: set[int]) -> bool:
    """Whether it has at least two matrices in modules of its own, and no watched weight."""
    if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
        return False
    if any(id(parameter) in watched for parameter in block.parameters()):
        return False
    return sum(map(has_matrix, block.modules())) > 1


def _sites_in(
    root: nn.Module, depth: Depth, blocks: Sequence[nn.Module] = (), *, by_modules: bool = True
) -> tuple[Site, ...]:
    """The sites of the sublayers; `blocks` are the modules of another library's blocks."""
    sites = []
    modules_of_root = set(root.modules())
    has_numbers_to_learn = any(weight.numel() == 1 for weight in root.parameters())
    for k, (sublayer, length) in enumerate(zip(depth.sublayers, depth.lengths, strict=True)):
        hooked: Mapping[str, Any] = {}
        if sublayer in modules_of_root:
            hooked = _ours(sublayer)
        elif by_modules:
            hooked = _theirs(sublayer, modules_of_root)
            is_last = k + 1 == len(depth.sublayers)
            if has_numbers_to_learn and blocks:
                hooked = {**hooked, **_with_learned_length(sublayer, blocks[-1], is_last=is_last)}
        site = Site(k, k // depth.per_block, length, sublayer, unit=depth.unit, **hooked)
        sites.append(site)
    return tuple(sites)


def _ours(sublayer: Sublayer) -> Mapping[str, Any]:
    hooked: dict[str, Any] = {
        "enter": sublayer,
        "exits": (MapOutput(sublayer),),
        "state_norm": sublayer.state_norm,
    }
    if sublayer.attention is not None:
        hooked["attention"] = sublayer.attention.field
    balanced = [
        branch.field for branch in sublayer.branches.values() if isinstance(branch.field, Balances)
    ]
    if balanced:
        hooked["router"] = balanced[0]
    return hooked


def _with_learned_length(
    sublayer: Sublayer, last_block: nn.Module, *, is_last: bool
) -> Mapping[str, Any]:
    """What a site needs for a length that a weight may be. The sum X + h r is what the next
    sublayer gets, or a norm around the state, or what the last block returns.
    """
    if sublayer.gain != 1:
        return {}
    if sublayer.state_norm is not None:
        return {"may_learn_length": getattr(sublayer.state_norm, "module", None) is not None}
    if is_last:
        return {"may_learn_length": True, "block_module": last_block}
    return {"may_learn_length": True}


def _theirs(sublayer: Sublayer, modules_of_root: set[nn.Module]) -> Mapping[str, Any]:
    """The modules of another library in a sublayer: its norms and maps, in the order in which they
    act.
    """
    branches = sublayer.branches
    maps = [map_outputs(branch.field, modules_of_root) for branch in branches.values()]
    if not all(maps):
        raise ConfigError(
            "cannot watch this model: the monitor needs blocks that call attention and FFN as"
            " modules"
        )
    input_norm = getattr(sublayer.input_norm, "module", None)
    output_norm = getattr(sublayer.output_norm, "module", None)
    first_modules = [outputs[0].module for outputs in maps]
    hooked: dict[str, Any] = {"state_norm": getattr(sublayer.state_norm, "module", None)}
    if input_norm is None:
        hooked["enter"] = first_modules[0]
    else:
        hooked["enter"] = input_norm
    if output_norm is None:
        hooked["exits"] = tuple(outputs[-1] for outputs in maps)
    else:
        hooked["exits"] = (MapOutput(output_norm),)
    if "attention" in branches:
        hooked["attention"] = first_modules[0]
        hooked["router"] = router_in(first_modules[1:])
    else:
        hooked["router"] = router_in(first_modules)
    return hooked
