"""The loss's gradient by layer and matrix, segment by segment: one sublayer's weights, gradients and graph at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ctrans.fields import ShowsMatrices
from ctrans.stability.backward.sensitivity import lengths, trajectory
from ctrans.sublayer import Sublayer
from ctrans.walk import Model, check_targets, cross_entropy
from ctrans.weights.on_demand import OnDemand, weights_of

NAMES = {"query": "W_Q", "key": "W_K", "value": "W_V", "out": "W_O", "gate": "W_G", "up": "W_1", "down": "W_2"}
"""The matrices of a map by role."""
AT_ONCE = 2**20
"""Entries of which a norm is taken at once: 8 MB in float64, and as much for their squares."""


@runtime_checkable
class Trained(Model, Protocol):
    """A `Model` of modules, which have weights: GPT and imported ones."""

    def modules(self) -> Iterator[nn.Module]: ...


@dataclasses.dataclass(frozen=True)
class SublayerGradient:
    """|dL/dW|_F of each matrix by name, and `total` over all weights of the sublayer, norms and biases too.

    Weights that are functions of depth count as what the sublayer uses, theta(s) at its place s: dL/dtheta(s) is that of equal
    free weights, whatever the basis, and a coefficient's gradient is the sum of phi_j(s) dL/dtheta(s) over the blocks.
    """

    kind: str
    matrices: dict[str, float]
    total: float


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The loss in nats, its gradient by sublayer, and over all weights outside of the depth (embeddings, final norm, head).

    Norms are of the gradients as they are; where one is not finite its norm is nan or inf.
    """

    loss: float
    sublayers: list[SublayerGradient]
    rest: float


def gradient_norms(
    model: Trained,
    tokens: Int[Tensor, "*batch tokens"],
    targets: Int[Tensor, "*batch tokens"],
    *,
    states: Sequence[Float[Tensor, "*batch tokens width"]] | None = None,
) -> Gradients:
    """|dL/dW| for L the mean cross-entropy of the model on those tokens. No weight's `grad` is touched, frozen ones count too.

    P_k = (dX_{k+1}/dX_k)' P_{k+1} and dL/dW_k = (dX_{k+1}/dW_k)' P_{k+1}, from P = dL/dX_T backward: the states are held, one more
    than there are segments, and beside them the weights, gradients and graph of one segment. `states` saves the way forward where
    they are known: X_0 to X_T of the discrete model on these tokens. What embedding and head share counts once, with both parts
    of its gradient.

    Raises ConfigError for targets that do not match the tokens or are all -1.
    """
    check_targets(tokens, targets)
    depth, outside = model.depth, _outside(model)
    x0, embedding = _embedded(model, tokens, outside)
    states = trajectory(depth, x0) if states is None else states
    loss, p, shared, unshared = _through_head(model, states[-1], targets, outside, embedding)
    sublayers: list[SublayerGradient] = []
    for sublayer, h, x in reversed(list(zip(depth.sublayers, lengths(depth), states, strict=False))):
        p, found = _through(sublayer, h, x, p)
        sublayers.insert(0, found)
    with _tracked(outside) as weights:
        # the zero has a gradient even where nothing in the embedding has one
        _pull(lambda zero: model.embed(tokens) + zero, torch.zeros_like(p), p, weights, shared)
    return Gradients(loss, sublayers, math.hypot(unshared, _norm(shared.values())))


@torch.no_grad()
def _embedded(model: Trained, tokens: Tensor, outside: Iterable[nn.Module]) -> tuple[Tensor, set[Hashable]]:
    """X_0, and which weights may take part in it."""
    with _tracked(outside) as weights:
        return model.embed(tokens).detach(), set(weights)


def _through_head(
    model: Trained, x: Tensor, targets: Tensor, outside: Iterable[nn.Module], embedding: set[Hashable]
) -> tuple[float, Tensor, dict[Hashable, Tensor], float]:
    """The loss, P at the end of the depth, the gradients of weights that the embedding has too, and the norm of all others."""
    found: dict[Hashable, Tensor] = {}
    with _tracked(outside) as weights:
        loss, p = _pull(lambda x: cross_entropy(model, x, targets), x, None, weights, found)
    unshared = _norm(found.pop(key) for key in list(found) if key not in embedding)
    return float(loss), p, found, unshared


def _through(sublayer: Sublayer, h: float, x: Tensor, p: Tensor) -> tuple[Tensor, SublayerGradient]:
    """P at a segment's start from P at its end, and the gradients of the sublayer's weights, of which only norms are kept."""
    with parametrize.cached():  # so that theta(s) is one tensor as long as it is looked at
        with torch.no_grad():
            weights = _weights(sublayer)
        norms: list[float] = []
        by_matrix: dict[str, float] = {}
        with _requiring_gradients(weights.values()), torch.enable_grad():
            x = x.detach().requires_grad_()
            y = sublayer.step(x, h)
            for name, weight in weights.items():
                # one after the other, as all gradients together are as large as the weights
                (gradient,) = torch.autograd.grad(y, weight, p, retain_graph=True, materialize_grads=True)
                norms.append(_norm([gradient]))
                by_matrix |= _by_matrix(sublayer, name, weight, gradient)
                del gradient
            (p,) = torch.autograd.grad(y, x, p)
        return p, SublayerGradient(sublayer.kind, by_matrix, math.sqrt(math.fsum(n * n for n in norms)))


@torch.enable_grad()
def _pull(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    p: Tensor | None,
    weights: Mapping[Any, Tensor],
    into: dict[Any, Tensor],
) -> tuple[Tensor, Tensor]:
    """(y, (dy/dx)' p) for y = function(x), p = 1 where it is None; adds (dy/dW)' p of the weights in use."""
    x = x.detach().requires_grad_()
    y = function(x)
    # not before: weights on demand are known once they are used
    gradient, *others = torch.autograd.grad(y, [x, *weights.values()], p, materialize_grads=True)
    for key, other in zip(weights, others, strict=True):
        into[key] = into[key] + other if key in into else other
    return y.detach(), gradient


def _weights(sublayer: Sublayer) -> dict[str, Tensor]:
    """What the sublayer uses, by name: parameters, weights on demand, and theta(s) in place of its coefficients."""
    free = {name: weight for name, weight in weights_of(sublayer).items() if "parametrizations." not in name}
    functions = {
        f"{path}.{name}": getattr(part, name)
        for path, part in sublayer.named_modules()
        if parametrize.is_parametrized(part)
        for name in part.parametrizations
    }
    return {name: weight for name, weight in (free | functions).items() if weight.is_floating_point()}


def _outside(model: Trained) -> list[nn.Module]:
    """The modules that are no part of the depth."""
    inside = set(model.depth.modules())
    return [part for part in model.modules() if part not in inside]


@contextlib.contextmanager
def _requiring_gradients(weights: Iterable[Tensor]) -> Iterator[None]:
    """Inside, those weights require gradients, frozen or not."""
    before = [(weight, weight.requires_grad) for weight in weights]
    try:
        for weight, _ in before:
            weight.requires_grad_()
        yield
    finally:
        for weight, required in before:
            weight.requires_grad_(required)


@contextlib.contextmanager
def _tracked(modules: Iterable[nn.Module]) -> Iterator[dict[Hashable, Tensor]]:
    """Inside, the modules' own weights require gradients; gives them by what they are, however often they are made.

    Those on demand come in when their module is called, so that nothing is made that is not used.
    """
    found: dict[Hashable, Tensor] = {}
    with contextlib.ExitStack() as stack:

        def add(key: Hashable, weight: Tensor) -> None:
            if key not in found and weight.is_floating_point():
                found[key] = weight
                stack.enter_context(_requiring_gradients([weight]))

        def called(part: OnDemand, _: object) -> None:
            for name, key in part.place.names.items():
                add(key, part.place.weight(name))

        for part in modules:
            for weight in part.parameters(recurse=False):
                add(id(weight), weight)
            if isinstance(part, OnDemand):
                stack.callback(part.register_forward_pre_hook(called).remove)
        yield found


@torch.no_grad()
def _by_matrix(sublayer: Sublayer, name: str, weight: Tensor, gradient: Tensor) -> dict[str, float]:
    """The norms of a weight's gradient by the matrices that the map shows of it, else by the name of a weight that is one."""
    if not isinstance(sublayer.field, ShowsMatrices):
        return {name: _norm([gradient])} if gradient.dim() == 2 else {}
    own, kept = weight.untyped_storage().data_ptr(), weight.data
    roles = [matrix.role for matrix in sublayer.field.matrices() if matrix.weight.untyped_storage().data_ptr() == own]
    if not roles:
        return {}
    try:
        weight.data = gradient  # so that the map's own views cut it into matrices
        return {NAMES[m.role]: _norm([m.weight]) for m in sublayer.field.matrices() if m.role in roles}
    finally:
        weight.data = kept


def _norm(tensors: Iterable[Tensor]) -> float:
    """In float64, in which squares do not underflow, of a part at a time; the order of the tensors does not matter."""
    parts = (part for tensor in tensors for part in tensor.reshape(-1).split(AT_ONCE))
    return math.sqrt(math.fsum(float(part.double().square().sum()) for part in parts))
