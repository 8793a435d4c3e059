"""The loss's gradient by layer and matrix, with one sublayer's weights, gradients and graph in
memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import ExposesWeights, Role
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.on_demand import OnDemand, weights_of
from ctrans.measure.walk import (
    Instrument,
    Model,
    ModelOfModules,
    StepContextBack,
    Turn,
    terminal_loss,
)
from solvers import ConfigError, Map

NAMES: dict[Role, str] = {
    "query": "W_Q",
    "key": "W_K",
    "value": "W_V",
    "out": "W_O",
    "gate": "W_G",
    "up": "W_1",
    "down": "W_2",
    "router": "W_R",
}
"""Names of a map's matrices by role."""
AT_ONCE = 2**20
"""Entries per part of a norm: 8 MB in float64, and as much for their squares."""


@dataclass(frozen=True)
class SublayerGradient:
    """|dL/dW|_F of each matrix by name, and `total` over all weights of the sublayer, including
    norms and biases.

    A weight that is a function of depth counts as its value theta(s) at the sublayer's place s.
    dL/dtheta(s) does not depend on the basis. A coefficient's gradient is the sum of phi_j(s)
    dL/dtheta(s) over the blocks.
    """

    kind: str
    matrices: dict[str, float]
    total: float


@dataclass(frozen=True)
class Gradients:
    """The loss in nats, its gradients by sublayer, and `rest`: |dL/dW|_F over all weights outside
    the depth (embeddings, final norm, head).

    Gradients are not clipped. A norm is nan or inf if its gradient is not finite.
    """

    loss: float
    sublayers: list[SublayerGradient]
    rest: float


class ParameterGradients(Instrument):
    """|dL/dW| of each weight, including frozen ones. It does not change any weight's `grad`.

    dL/dW_k = (dX_{k+1}/dW_k)' P_{k+1}, from P = dL/dX_T backward. In addition to the walk's states
    it keeps the gradient of one weight at a time, and those of the head all at once. A weight that
    embedding and head share (a tied head) counts once, with the sum of both gradients; its head
    gradient is kept until the embedding.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._sublayers: list[SublayerGradient] = []

    def head(self, model: Model, at: Turn) -> None:
        """Keeps the gradients of weights that the embedding shares, and the norm of the others."""
        if not isinstance(model, ModelOfModules):
            raise ConfigError(
                f"a {type(model).__name__} has no modules, so its weights are unknown: give an"
                " nn.Module"
            )
        self._loss = at.loss
        self._outside = outside(model)
        with tracked(self._outside) as weights, torch.enable_grad():
            used = leaves(model.embed(at.tokens))
            embedding = {key for key, weight in weights.items() if id(weight) in used}
        with tracked(self._outside) as weights:
            self._tied = pulled(lambda x: terminal_loss(model, x, at.targets), at.x, None, weights)
        alone = [
            key
            for key, gradient in self._tied.items()
            if key not in embedding or not gradient.any()
        ]
        self._untied = _norm(self._tied.pop(key) for key in alone)

    def backward(self, at: StepContextBack) -> None:
        self._sublayers.insert(0, _of_sublayer(at))

    def embedding(self, model: Model, tokens: Tensor, p: Tensor) -> None:
        with tracked(self._outside) as weights:
            through = pulled(
                lambda zero: model.embed(tokens) + zero, torch.zeros_like(p), p, weights
            )
        for key, before in self._tied.items():
            through[key] = before + through[key]
        self._tied = through

    def figures(self) -> Gradients:
        return Gradients(
            self._loss, self._sublayers, math.hypot(self._untied, _norm(self._tied.values()))
        )


def leaves(x: Tensor) -> set[int]:
    """The ids of the leaf tensors that x depends on."""
    ids = set[int]()
    seen = set[Any]()
    waiting = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [inner for inner, _ in node.next_functions]
            if hasattr(node, "variable"):
                ids.add(id(node.variable))
    return ids


def _of_sublayer(at: StepContextBack) -> SublayerGradient:
    """The norms of the gradients of the sublayer's weights."""
    sublayer = at.sublayer
    with parametrize.cached():  # theta(s) is one tensor inside
        with torch.no_grad():
            weights = used_weights(sublayer)
        norms: list[float] = []
        by_matrix: dict[str, float] = {}
        with requiring_gradients(weights.values()), torch.enable_grad():
            y = sublayer.step(at.x.detach().requires_grad_(), at.h)  # a detached map has gradient 0
            for name, weight in weights.items():
                # one at a time: all gradients together are as large as the weights
                (gradient,) = torch.autograd.grad(
                    y, weight, at.p, retain_graph=True, materialize_grads=True
                )
                norms.append(_norm([gradient]))
                # several matrices can have one role
                for matrix, size in _by_matrix(sublayer, name, weight, gradient, norms[-1]).items():
                    by_matrix[matrix] = math.hypot(by_matrix.get(matrix, 0.0), size)
                del gradient
        return SublayerGradient(
            sublayer.kind, by_matrix, math.sqrt(math.fsum(n * n for n in norms))
        )


@torch.enable_grad()
def pulled(
    function: Map, x: Tensor, p: Tensor | None, weights: Mapping[Hashable, Tensor]
) -> dict[Hashable, Tensor]:
    """(dy/dW)' p of each weight for y = function(x), with p = 1 if it is None."""
    x = x.detach().requires_grad_()
    y = function(x)
    # after the call, because weights on demand are known once they are used; x has a gradient even
    # if no weight has one
    _, *gradients = torch.autograd.grad(y, [x, *weights.values()], p, materialize_grads=True)
    return dict(zip(weights, gradients, strict=True))


def used_weights(sublayer: Sublayer) -> dict[str, Tensor]:
    """The sublayer's weights by name: parameters, weights on demand, and theta(s) in place of its
    coefficients.
    """
    free = {
        name: weight
        for name, weight in weights_of(sublayer).items()
        if "parametrizations." not in name
    }
    functions = {
        f"{path}.{name}": getattr(part, name)
        for path, part in sublayer.named_modules()
        if parametrize.is_parametrized(part)
        for name in part.parametrizations
    }
    return {
        name: weight for name, weight in (free | functions).items() if weight.is_floating_point()
    }


def outside(model: ModelOfModules) -> list[nn.Module]:
    """The modules outside the depth."""
    inside = set(model.depth.modules())
    return [part for part in model.modules() if part not in inside]


@contextmanager
def requiring_gradients(weights: Iterable[Tensor]) -> Iterator[None]:
    """Inside the context, these weights require gradients, frozen or not."""
    before = [(weight, weight.requires_grad) for weight in weights]
    try:
        for weight, _ in before:
            weight.requires_grad_()
        yield
    finally:
        for weight, required in before:
            weight.requires_grad_(required)


@contextmanager
def tracked(modules: Iterable[nn.Module]) -> Iterator[dict[Hashable, Tensor]]:
    """Inside the context, the modules' own weights require gradients. Yields them by a key that is
    the same each time a weight is made.

    Weights on demand are added when their module is called, so unused ones are never made.
    """
    weights: dict[Hashable, Tensor] = {}
    with ExitStack() as stack:

        def add(key: Hashable, weight: Tensor) -> None:
            if key not in weights and weight.is_floating_point():
                weights[key] = weight
                stack.enter_context(requiring_gradients([weight]))

        def called(part: OnDemand, _: object) -> None:
            for name, key in part.place.names.items():
                add(key, part.place.weight(name))

        for part in modules:
            for weight in part.parameters(recurse=False):
                add(id(weight), weight)
            if isinstance(part, OnDemand):
                stack.callback(part.register_forward_pre_hook(called).remove)
        yield weights


@torch.no_grad()
def _by_matrix(
    sublayer: Sublayer, name: str, weight: Tensor, gradient: Tensor, size: float
) -> dict[str, float]:
    """The norms of a weight's gradient by the matrices that the map exposes of it, else by its name
    if it is a matrix. `size` is the norm of the whole gradient.
    """
    if not isinstance(sublayer.field, ExposesWeights):
        if gradient.dim() == 2:
            return {name: size}
        return {}
    norms: dict[str, float] = {}
    data = weight.data
    try:
        weight.data = gradient  # the map itself then cuts the gradient into matrices
        for matrix in sublayer.field.matrices():
            if (
                matrix.copied is weight
                or matrix.weight.untyped_storage().data_ptr()
                == gradient.untyped_storage().data_ptr()
            ):
                role = NAMES[matrix.role]
                # an exposed matrix may be scaled, but the gradient is of the unscaled weight
                of_matrix = size
                if matrix.weight.numel() != gradient.numel():
                    of_matrix = _norm([matrix.weight])
                norms[role] = math.hypot(norms.get(role, 0.0), of_matrix)
        return norms
    finally:
        weight.data = data


def _norm(tensors: Iterable[Tensor]) -> float:
    """|.|_F of all tensors together, in float64 so that squares do not underflow. The order of the
    tensors does not matter.
    """
    parts = (part for tensor in tensors for part in tensor.reshape(-1).split(AT_ONCE))
    return math.sqrt(math.fsum(float(part.double().square().sum()) for part in parts))
