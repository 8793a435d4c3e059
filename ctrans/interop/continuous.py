"""Turns blocks of a discrete model into ODEs in place, and back.

A block remains the same module. Its parameters keep their objects and their names in the state
dict, so the model's trainer, checkpoints and hooks keep working, and a checkpoint of either form
loads into the other. Only the computation changes: a subclass of the block's class has a forward
that solves the block's two segments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.ode_block import in_context
from ctrans.dynamics.scheme import Scheme
from ctrans.dynamics.weights.on_demand import check_present
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.block_calls import StateForm, bind, own_context, recorded
from ctrans.interop.example_inputs import example_of
from ctrans.interop.find_blocks import find_blocks
from ctrans.interop.open_model import check_model
from ctrans.interop.recognise import recognise
from solvers import ConfigError, Gradient, Method

Model = TypeVar("Model", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class Flow:
    """What a continuous block computes, and its original class. `depth` shares the block's
    modules.
    """

    depth: Depth
    scheme: Scheme
    discrete: type[Any]
    used_cache: bool
    """Whether `continuize` turned config.use_cache off."""


def continuize(
    model: Model,
    layers: int | Iterable[int] | None = None,
    *,
    dt: float = 1.0,
    method: str | Method = "euler",
    steps: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    gradient: str | Gradient = "backprop",
    anatomy: Anatomy | None = None,
    example: Mapping[str, Any] | None = None,
) -> Model:
    """Turns blocks of a nanoGPT or Hugging Face model into ODEs, in place: each solves dX/dt =
    v_attention for dt, then v_ffn for dt.

    - `layers`: the blocks' indices, all if None. Consecutive blocks are solved one after the other,
      which loses nothing, because no step crosses the end of a segment
    - `dt`: the depth-time of each attention and FFN
    - `method`, `steps`, `rtol`, `atol`, `gradient`: the blocks' `Scheme`
    - `anatomy`: paths of the parts of a model whose names are not known
    - `example`: the arguments of a forward pass, if they cannot be guessed

    The model calls its blocks as before: masks and positions go to each evaluation of their
    attention. With one Euler step and dt = 1 the model's output is unchanged (of parallel blocks
    that add in another order, but for the last bit) and a cache works. Otherwise a cache raises
    ConfigError, and `model.config` turns it off. Dropout draws a new mask at each evaluation. An
    adaptive method then takes very small steps, and the gradients `adjoint` and `reversible` raise
    an error. Returns the model; `discretize` restores it.

    A saved model is the discrete one, by names and config: after loading, call `continuize` again
    with the same arguments. `output_attentions` gives the attentions of all evaluations. Norms of
    other libraries that round to float32 are computed in float64 if the state is float64.

    Raises ConfigError for invalid layers, blocks of unknown structure, and an invalid scheme.
    """
    scheme = Scheme(method, steps, rtol, atol, gradient)
    anatomy = anatomy or Anatomy()
    check_model(model)
    check_present(model, "trained as an ODE")
    blocks = find_blocks(model, anatomy)
    chosen = _chosen(layers, blocks)
    with as_found(model), torch.no_grad():
        if example is None:
            example = example_of(model)
        inputs = example
        calls = recorded(blocks, lambda: model(**inputs))
        depths = {i: recognise(blocks[i], calls[i], anatomy, StateForm()).depth(dt) for i in chosen}
    for depth in depths.values():
        scheme.check(depth)
    uses_cache = bool(getattr(getattr(model, "config", None), "use_cache", False))
    turn_cache_off = uses_cache and not scheme.evaluates_once
    if turn_cache_off:
        _set_use_cache(model, value=False)
    for i, depth in depths.items():
        block = blocks[i]
        flow = Flow(depth, scheme, type(block), used_cache=turn_cache_off)
        block.__class__ = _continuous(type(block))  # type: ignore[arg-type]  # classes are hashable
        block.flow = flow  # type: ignore[assignment]  # not a tensor
    return model


def discretize(model: Model) -> Model:
    """Reverses `continuize` in place: the blocks keep their current weights and are discrete again.
    Returns the model.
    """
    for block in model.modules():
        flow = vars(block).get("flow")
        if isinstance(flow, Flow):
            block.__class__ = flow.discrete
            del block.flow
            if flow.used_cache:
                _set_use_cache(model, value=True)
    return model


@functools.cache
def _continuous(discrete: type[Any]) -> type[Any]:
    """The block's class with the forward of an ODE. It is a subclass, because libraries find blocks
    to hook by their class.
    """

    @functools.wraps(discrete.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        flow: Flow = self.flow
        call = bind(flow.discrete, args, kwargs)
        depth = in_context(flow.depth, own_context(call, cached=flow.scheme.evaluates_once))
        return flow.scheme.solve(depth, call.x).x1

    return type(f"Continuous{discrete.__name__}", (discrete,), {"forward": forward})


def _chosen(layers: int | Iterable[int] | None, blocks: list[nn.Module]) -> list[int]:
    """The indices of the blocks to change, sorted and without repetition."""
    if layers is None:
        indices = list(range(len(blocks)))
    elif isinstance(layers, int):
        indices = [layers]
    else:
        indices = list(layers)
    for i in indices:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(blocks):
            raise ConfigError(f"layer {i!r}: the model has blocks 0 to {len(blocks) - 1}")
    if not indices:
        raise ConfigError(
            f"no layers given: give some of 0 to {len(blocks) - 1}, or leave layers out for all"
        )
    return sorted(set(indices))


def _set_use_cache(model: nn.Module, *, value: bool) -> None:
    for name in ("config", "generation_config"):
        config = getattr(model, name, None)
        if config is not None:
            config.use_cache = value
