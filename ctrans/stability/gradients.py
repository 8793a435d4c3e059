"""The loss's gradient by layer and matrix."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from ctrans.gpt import GPT
from ctrans.sublayer import Matrix, Sublayer
from solvers import ConfigError

NAMES = {"attention": ("W_Q", "W_K", "W_V", "W_O"), "ffn": ("W_1", "W_2")}
"""The matrices of a map, in the order of its `matrices()`."""


@runtime_checkable
class HasMatrices(Protocol):
    """A map that shows its weight matrices."""

    def matrices(self) -> Iterator[Matrix]: ...


@dataclasses.dataclass(frozen=True)
class SublayerGradient:
    """|dL/dW|_F of each matrix by name, and `total` over all parameters of the sublayer, norms and biases too."""

    kind: str
    matrices: dict[str, float]
    total: float


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The loss in nats, its gradient by sublayer, and over all other parameters (embeddings, final norm).

    Norms are of the gradients as they are; where one is not finite its norm is nan or inf.
    """

    loss: float
    sublayers: list[SublayerGradient]
    rest: float


def gradient_norms(model: GPT, tokens: Int[Tensor, "*batch tokens"], targets: Int[Tensor, "*batch tokens"]) -> Gradients:
    """|dL/dW| for L the mean cross-entropy of the model on those tokens. No parameter's `grad` is touched, frozen ones count too.

    Raises ConfigError for targets that are all -1.
    """
    if not bool((targets != -1).any()):
        raise ConfigError("every target is -1, so there is no loss: give at least one token to predict")
    parameters = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}
    with torch.enable_grad():
        loss = torch.func.functional_call(model, parameters, (tokens, targets))[1]
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    by_name = dict(zip(parameters, gradients, strict=True))
    sublayers = []
    for k, sublayer in enumerate(model.depth.sublayers):
        prefix = f"depth.sublayers.{k}."
        own = {name.removeprefix(prefix): by_name.pop(name) for name in list(by_name) if name.startswith(prefix)}
        sublayers.append(SublayerGradient(sublayer.kind, _by_matrix(sublayer, own), _norm(own.values())))
    return Gradients(float(loss.detach()), sublayers, _norm(by_name.values()))


@torch.no_grad()
def _by_matrix(sublayer: Sublayer, gradients: dict[str, Tensor]) -> dict[str, float]:
    """The gradients put in the place of the parameters of a copy, so that its own views cut them into matrices."""
    if not isinstance(sublayer.field, HasMatrices):
        return {name: _norm([gradient]) for name, gradient in gradients.items() if gradient.dim() == 2}
    twin = copy.deepcopy(sublayer)
    twin.load_state_dict(gradients, strict=False)
    matrices = [matrix.weight for matrix in twin.field.matrices()]
    return {name: _norm([weight]) for name, weight in zip(NAMES[sublayer.kind], matrices, strict=True)}


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
