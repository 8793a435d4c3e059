"""Where a training is looked at: the user's own modules in which a sublayer's state comes in and its velocity goes out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ctrans.depth import Depth
from ctrans.fields import Kind
from ctrans.interop import open_model
from ctrans.interop.calls import own_module
from ctrans.interop.hosts import tensor_in
from ctrans.interop.multihead import UnfoldedAttention
from ctrans.interop.residual_scale import ScaledOutput
from ctrans.model.text import default_text
from ctrans.sublayer import Sublayer
from ctrans.walk import Model
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """Sublayer k of a model that trains: X comes into `enter`, and r = tail(what `leave` puts out) is its raw velocity.

    `attention` is the module in which its scores are computed, None for an FFN; `router` the one that chooses experts, where there is
    one. `length` is h in the step X + h r.
    """

    k: int
    kind: Kind
    block: int
    length: float
    sublayer: Sublayer
    enter: nn.Module
    leave: nn.Module
    tail: Callable[[Tensor], Tensor]
    state_norm: nn.Module | None
    attention: nn.Module | None
    router: nn.Module | None

    @property
    def place(self) -> str:
        """'block 3, attention'."""
        return f"block {self.block}, {self.kind}"


@dataclasses.dataclass(frozen=True, eq=False)
class Sites:
    """A model that trains: `root` is the user's own module, `model` the same as instruments look at it, whose modules are the user's.

    `logits(output)` finds the logits (*batch, tokens, vocabulary) in what the root returns, None where there are none. `vocabulary` is
    0 where the model reads no tokens. `said` is what was recognised, in a line.
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


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module within what torch.compile and DistributedDataParallel made of it."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was asked of it, or of a part of it."""
    parts = [*model.modules(), *unwrapped(model).modules()]
    return any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in parts)


def sites_of(model: nn.Module, **opening: Any) -> Sites:
    """The sites of a model of ctrans, or of any that `open_model` opens, whose options `opening` are.

    The model is read in evaluation mode and is afterwards as it was: modes, gradients asked for, random numbers. Raises ConfigError
    for what cannot be opened, in `open_model`'s words, and for a model whose weights are elsewhere (sharded before it came here).
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a {type(model).__name__} does not train: give the nn.Module that does")
    root = unwrapped(model)
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


def own_parameters(sites: Sites) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """The parameters of every sublayer, and those outside of the depth. Found anew each time: sharding replaces them."""
    inside = [list(site.sublayer.parameters()) for site in sites.sites]
    known = {id(parameter) for each in inside for parameter in each}
    return inside, [parameter for parameter in sites.root.parameters() if id(parameter) not in known]


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
        "leave": sublayer,
        "tail": _itself,
        "state_norm": sublayer.state_norm,
        "attention": None if branch is None else branch.field,
        "router": _router(sublayer.field),
    }


def _theirs(sublayer: Sublayer, own: set[nn.Module]) -> Mapping[str, Any]:
    """By the modules of another library within our sublayer: its norms' and its map's, in the order in which they act."""
    if len(sublayer.branches) > 1:
        raise ConfigError(
            "attention and FFN of this model act at once, so that no module of it gives a sublayer's velocity to a hook: look at it with "
            "ctrans screen, or train such blocks as GPTConfig(parallel_blocks=True)"
        )
    stages = [stage for stage in _stages(sublayer.field) if not isinstance(stage, ScaledOutput)]
    acting = [part for stage in stages if (part := _own_within(stage, own)) is not None]
    if not acting:
        raise ConfigError(f"no module of the model was found in its {sublayer.kind}: its functions alone cannot be watched")
    norms = {role: None if norm is None else norm.module for role, norm in _norms(sublayer).items()}
    leave = norms["output_norm"] or acting[-1]
    scaled = [stage for stage in _stages(sublayer.field) if isinstance(stage, ScaledOutput)] if leave is acting[-1] else []
    return {
        "enter": norms["input_norm"] or acting[0],
        "leave": leave,
        "tail": scaled[0] if scaled else _itself,
        "state_norm": norms["state_norm"],
        "attention": acting[0] if sublayer.kind == "attention" else None,
        "router": None if sublayer.kind == "attention" else _router(acting[0]),
    }


def _norms(sublayer: Sublayer) -> dict[str, Any]:
    return {role: getattr(sublayer, role) for role in ("input_norm", "output_norm", "state_norm")}


def _stages(field: Any) -> list[nn.Module]:
    chain = getattr(field, "attention", field)
    return list(chain.stages)


def _own_within(stage: nn.Module, own: set[nn.Module]) -> nn.Module | None:
    """The model's own module that a stage is or holds; the first of several."""
    if isinstance(stage, UnfoldedAttention):  # torch's own attention calls its last map as a function
        return next((part for part in own if getattr(part, "out_proj", None) is stage.out), None)
    if own_module(stage) in own:
        return own_module(stage)
    return next((part for part in stage.modules() if part in own), None)


ROUTERS = ("gate", "router")
"""What libraries call the map that chooses experts; it stands beside `experts`."""


def _router(field: nn.Module) -> nn.Module | None:
    for part in field.modules():
        if hasattr(part, "experts"):
            return next((router for name in ROUTERS if isinstance(router := getattr(part, name, None), nn.Module)), None)
    return None


def _itself(x: Tensor) -> Tensor:
    return x


def held_text(vocabulary: int, sequences: int, tokens: int) -> tuple[Tensor, Tensor] | None:
    """Bytes of the text that Python ships as (tokens, next tokens), for a model that embeds at least 256; None for another."""
    if vocabulary < 256:
        return None
    text = torch.frombuffer(bytearray(default_text()[: sequences * (tokens + 1)]), dtype=torch.uint8).long()
    rows = text.reshape(sequences, tokens + 1)
    return rows[:, :-1], rows[:, 1:]
