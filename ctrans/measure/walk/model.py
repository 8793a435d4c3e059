"""The model as instruments see it: X_0 = embed(tokens), a depth that maps it to X_T, logits =
head(X_T), and a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ctrans.base.protocol import AsksTheInstance
from ctrans.base.shapes import Scalar, TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.model.gpt import counted
from solvers import ConfigError, Solution, is_dense, shown


@runtime_checkable
class Model(Protocol, metaclass=AsksTheInstance):
    """A model with a costate, such as a GPT or an imported model."""

    @property
    def depth(self) -> Depth: ...

    def embed(self, tokens: Tensor) -> Tensor: ...

    def head(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class ModelOfModules(Model, Protocol):
    """A `Model` of modules with weights."""

    def modules(self) -> Iterator[nn.Module]: ...


@runtime_checkable
class Described(Protocol, metaclass=AsksTheInstance):
    """An architecture: a `GPTConfig`, or what ctrans recognised in a model of another library.

    `placement` is a name of `PLACEMENTS`, or several if sublayers differ; `norm` in the same way.
    `initialisation` is None if it is unknown how the weights were drawn.
    """

    @property
    def placement(self) -> str: ...

    @property
    def norm(self) -> str: ...

    @property
    def dt(self) -> float: ...

    @property
    def width(self) -> int: ...

    @property
    def initialisation(self) -> str | None: ...


@runtime_checkable
class DescribedModel(ModelOfModules, Protocol):
    """A model of modules that has a description and integrates its ODE."""

    @property
    def config(self) -> Described: ...

    def trajectory(self, tokens: Tensor, **options: Any) -> Solution: ...


def kept_of(model: object) -> Bool[Tensor, "batch tokens"] | None:
    """The tokens that are text and not padding, from the model's `kept`; None if all are."""
    mask: Tensor | None = getattr(model, "kept", None)
    return mask


def own_loss(model: Model) -> Callable[[Tensor, Any], Tensor] | None:
    """L(X_T, targets): the model's `terminal_loss`; None without one."""
    loss: Callable[[Tensor, Any], Tensor] | None = getattr(model, "terminal_loss", None)
    return loss


def terminal_loss(model: Model, x: TokenRows, targets: Any) -> Scalar:
    """L(X_T): the model's own loss, or the mean cross-entropy of its logits. Raises as
    `cross_entropy`.
    """
    loss_of_model = own_loss(model)
    if loss_of_model is None:
        return cross_entropy(model, x, targets)
    return loss_of_model(x, targets)


def check_targets(model: Model, tokens: Tensor, targets: Any) -> None:
    """Raises ConfigError unless the model has its own loss, or each token has one target of int64
    and not all are -1 or -100, which do not count.
    """
    if own_loss(model) is not None:
        return
    if not is_dense(targets):
        raise ConfigError(f"the targets are {shown(targets)}: give a tensor of int64")
    if targets.shape != tokens.shape:
        shapes = f"shape {tuple(targets.shape)} and tokens {tuple(tokens.shape)}"
        raise ConfigError(f"targets have {shapes}: give one target per token")
    if targets.dtype != torch.int64:
        raise ConfigError(f"the targets are of {targets.dtype}: give a tensor of int64")
    if targets.device != tokens.device:
        raise ConfigError(
            f"the targets are on {targets.device} and the tokens on {tokens.device}: move one to"
            " the other"
        )
    if targets.device.type != "cpu":
        return  # the checks of entries would wait for the device
    targets = counted(targets)
    if not (targets != -1).any():
        raise ConfigError(
            "every target is -1 or -100, so there is no loss: give at least one token to predict"
        )
    most = getattr(getattr(model, "config", None), "vocab_size", math.inf)
    if int(targets.min()) < -1 or int(targets.max()) >= most:
        span = f"targets run from {int(targets.min())} to {int(targets.max())}"
        allowed = "0"
        if most < math.inf:
            allowed = f"0 and end at {most - 1}"
        raise ConfigError(f"{span}: give token ids, which start at {allowed}, or -1 or -100")


def loss_refusal(model: Model, tokens: Tensor, targets: Any) -> str | None:
    """Why this model has no loss for targets of this shape, tested by its head at X_0; None if it
    has one. Raises ConfigError for wrong targets (`check_targets`).
    """
    check_targets(model, tokens, targets)
    try:
        with torch.no_grad():
            terminal_loss(model, model.embed(tokens), targets)
    except ConfigError as error:
        return str(error)
    return None


def cross_entropy(model: Model, x: TokenRows, targets: Int[Tensor, "..."]) -> Scalar:
    """L(X_T): the mean cross-entropy of head(X_T) in nats. Targets of -1 and -100 do not
    count.

    Raises ConfigError unless the head gives one row of logits for each target, and on the CPU for
    targets without a logit.
    """
    logits = model.head(x)
    targets = counted(targets)
    if logits.shape[:-1].numel() != targets.numel():
        shapes = f"the head gives {tuple(logits.shape)} for targets {tuple(targets.shape)}"
        raise ConfigError(f"{shapes}: take a model with logits of every token")
    # on an accelerator the check would wait for the device; there the loss raises
    if (
        targets.device.type == "cpu"
        and not -1 <= int(targets.min()) <= int(targets.max()) < logits.shape[-1]
    ):
        span = f"targets run from {int(targets.min())} to {int(targets.max())}"
        raise ConfigError(
            f"{span}, and the head gives {logits.shape[-1]} numbers per token: give targets below"
            " that, or a model whose head has a logit for every token"
        )
    flat = logits.flatten(0, -2)
    loss = F.cross_entropy(flat, targets.flatten(), ignore_index=-1)
    if not loss.requires_grad:
        return loss
    # the same loss, whose gradient keeps its digits where a target's probability p is near 1:
    # autograd's p - 1 would lose them
    precise = _cross_entropy_of_differences(flat, targets.flatten())
    return precise + (loss - precise).detach()


def _cross_entropy_of_differences(logits: Tensor, targets: Tensor) -> Scalar:
    """The mean over targets of log(1 + sum over other tokens v of exp(l_v - l_target))."""
    counts = targets != -1
    logits = logits[counts]
    chosen = targets[counts].unsqueeze(-1)
    differences = (logits - logits.gather(-1, chosen)).scatter(-1, chosen, 0.0)
    return differences.logsumexp(-1).mean()
