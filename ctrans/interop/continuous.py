"""Blocks of a discrete model made into ODEs in place, and back.

A block stays the module that it was: its parameters keep their objects and their names in the state
dict, so that the model's trainer, checkpoints, and hooks go on working, and a checkpoint of either
form loads into the other. Only what it computes changes, by a subclass of its own class whose
forward solves the block's two segments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.block_calls import StateForm, bind, evaluating, own_context, recorded
from ctrans.interop.example_inputs import example_of
from ctrans.interop.find_blocks import find_blocks
from ctrans.interop.recognise import recognise
from ctrans.ode_block import in_context
from ctrans.scheme import Scheme
from ctrans.weights.on_demand import check_present
from solvers import ConfigError, Gradient, Method

Model = TypeVar("Model", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class Flow:
    """What a continuous block computes, and what it was: kept beside its modules, which `depth`
    shares.
    """

    depth: Depth
    scheme: Scheme
    discrete: type[Any]
    used_cache: bool | None
    """The model's config.use_cache before, where it had to be turned off."""


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
    """Makes blocks of a nanoGPT or Hugging Face model ODEs, in place: each solves dX/dt =
    v_attention, then v_ffn, for dt each.

    - `layers`: the blocks' numbers, all if None; a run of blocks is solved one after the other,
      which no solver could better, since no step crosses a segment's end
    - `dt`: for how much depth-time each attention and FFN acts
    - `method`, `steps`, `rtol`, `atol`, `gradient`: the blocks' `Scheme`
    - `anatomy`: the parts of a model that is not recognised, by name
    - `example`: the arguments of a forward pass where they cannot be guessed

    The blocks are called as before: masks and positions go to every evaluation of their attention.
    At Euler, one step, dt = 1 the model computes what it did; then a cache works too, and otherwise
    it is refused, and turned off in `model.config`. Dropout draws anew at every evaluation, which
    an adaptive method takes for stiffness and the gradients `adjoint` and `reversible` refuse.
    Returns the model; `discretize` undoes all.

    What is saved is the discrete model, by names and config: after loading, call this again with
    the same arguments. Attentions by `output_attentions` are those of every evaluation. In float64
    norms of other libraries, which round to float32, are computed without that rounding.

    Raises ConfigError for layers that there are not, blocks of no known structure, and a scheme
    that makes no sense.
    """
    scheme = Scheme(method, steps, rtol, atol, gradient)
    anatomy = Anatomy() if anatomy is None else anatomy
    check_present(model, "trained as an ODE")
    blocks = find_blocks(model, anatomy)
    chosen = _chosen(layers, blocks)
    with evaluating(model):
        inputs = example_of(model) if example is None else example
        calls = recorded(blocks, lambda: model(**inputs))
        depths = {i: recognise(blocks[i], calls[i], anatomy, StateForm()).depth(dt) for i in chosen}
    for depth in depths.values():
        scheme.check(depth)
    used_cache = None if scheme.evaluates_once else _turn_cache_off(model)
    for i, depth in depths.items():
        block = blocks[i]
        flow = Flow(depth, scheme, type(block), used_cache)
        block.__class__ = _continuous(type(block))  # type: ignore[arg-type]  # classes are hashable
        block.flow = flow  # type: ignore[assignment]  # not a tensor
    return model


def discretize(model: Model) -> Model:
    """Takes `continuize` back, in place: the blocks with the weights that they have now, discrete
    again. Returns the model.
    """
    for block in model.modules():
        flow = vars(block).get("flow")
        if isinstance(flow, Flow):
            block.__class__ = flow.discrete
            del block.flow
            if flow.used_cache is not None:
                _use_cache(model, flow.used_cache)
    return model


@functools.cache
def _continuous(discrete: type[Any]) -> type[Any]:
    """The block's class with the forward of an ODE; a subclass, because libraries find blocks to
    hook by their class.
    """

    @functools.wraps(discrete.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        flow: Flow = self.flow
        call = bind(flow.discrete, args, kwargs)
        depth = in_context(flow.depth, own_context(call, flow.scheme.evaluates_once))
        return flow.scheme.solve(depth, call.x).x1

    return type(f"Continuous{discrete.__name__}", (discrete,), {"forward": forward})


def _chosen(layers: int | Iterable[int] | None, blocks: list[nn.Module]) -> list[int]:
    """The numbers of the blocks to change, in order and once each."""
    wanted = range(len(blocks)) if layers is None else [layers] if isinstance(layers, int) else list(layers)
    for i in wanted:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(blocks):
            raise ConfigError(f"layer {i!r}: the model has blocks 0 to {len(blocks) - 1}")
    if not wanted:
        raise ConfigError(f"no layers given: name some of 0 to {len(blocks) - 1}, or leave layers out for all")
    return sorted(set(wanted))


def _turn_cache_off(model: nn.Module) -> bool | None:
    """What config.use_cache was, now False; None for a model that has no such thing or has it off."""
    if not getattr(getattr(model, "config", None), "use_cache", False):
        return None
    _use_cache(model, False)
    return True


def _use_cache(model: nn.Module, wanted: bool) -> None:
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if config is not None:
            config.use_cache = wanted
