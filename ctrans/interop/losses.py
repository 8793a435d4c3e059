"""Losses of an opened model: the one it was trained for, the user's, or a stand-in that needs no
head.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ctrans.base.shapes import TokenRows
from ctrans.control.model_threshold import factors_of_model
from ctrans.control.shown_factors import Factors
from ctrans.dynamics.depth import Depth
from ctrans.interop.block_calls import tensors_in
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.imported import Imported
from ctrans.interop.loss_names import LOSS_NAMES, Loss
from ctrans.interop.model_adapter import tensor_in
from ctrans.interop.ot_transformer import OTTransformer
from ctrans.interop.probe_weights import random_states
from ctrans.measure.walk import kept_of
from ctrans.model.gpt import GPT, counted
from solvers import ConfigError, Solution, is_class, shown

AnyModel = GPT | OTTransformer | Imported
Tensors = Callable[[Any], Tensor | None]
"""From all that a model returns to its main tensor."""


class ModelAround(nn.Module):
    """A wrapper with the depth, embeddings and head of another model."""

    model: Any

    @property
    def depth(self) -> Depth:
        depth: Depth = self.model.depth
        return depth

    @property
    def config(self) -> Any:
        """What was recognised: a `Described`."""
        return self.model.config

    @property
    def kept(self) -> Bool[Tensor, "batch tokens"] | None:
        """Where there is text and not padding (`Imported.padded`)."""
        return kept_of(self.model)

    def factors(self, states: Sequence[Tensor]) -> Factors:
        """That of the model."""
        return factors_of_model(self.model, states)

    def embed(self, tokens: Tensor) -> TokenRows:
        x: Tensor = self.model.embed(tokens)
        return x

    def head(self, x: TokenRows) -> Tensor:
        output: Tensor = self.model.head(x)
        return output

    def trajectory(self, tokens: Tensor, **options: Any) -> Solution:
        solution: Solution = self.model.trajectory(tokens, **options)
        return solution


class ModelWithLoss(ModelAround):
    """A model with the loss L(X_T) = loss(output for X_T, targets). All else is the model's.
    `is_chosen` is False for a loss that stands in for one that nobody named.
    """

    def __init__(self, model: AnyModel, loss: Loss, *, is_chosen: bool = True):
        super().__init__()
        self.model = model
        self.loss = loss
        self.is_chosen = is_chosen

    def forward(self, tokens: Tensor, targets: Any = None) -> tuple[Tensor, Tensor | None]:
        """The output of the head, and with `targets` the loss."""
        x = self.depth(self.embed(tokens))
        output = self.head(x)
        if targets is None:
            return output, None
        return output, self.terminal_loss(x, targets)

    def own_pass(self, tokens: Tensor, targets: Any) -> tuple[Tensor | None, Tensor | None]:
        """The loss of a forward pass of the model itself; none as `Imported.own_pass`."""
        if not isinstance(self.model, Imported):
            return None, self.loss(self.model(tokens)[0], targets)
        logits, _ = self.model.own_pass(tokens, targets)
        if logits is None:
            return None, None
        return None, self.loss(self.model.adapter.run(tokens), targets)

    def why_other_loss(self) -> str:
        """Why nobody knows its loss; "" if the user said which it is."""
        if self.is_chosen:
            return ""
        return (
            "its loss is not known, and a mean product with fixed numbers stands in for it: give"
            " its loss as loss="
        )

    def terminal_loss(self, x: TokenRows, targets: Any) -> Float[Tensor, ""]:
        """L as a function of X_T. Raises ConfigError unless the loss is one real number with
        derivatives by X_T.
        """
        if isinstance(self.model, Imported):
            outputs = self.model.outputs(x)
        else:
            outputs = self.model.head(x)
        try:
            value = self.loss(outputs, targets)
        except ConfigError:
            raise
        except FOREIGN_ERRORS as error:
            raise ConfigError(
                f"loss=: {name_of(self.loss)} does not run on {len(x)} sequences of"
                f" {x.shape[-2]} tokens ({named_error(error)}): give a loss for batches of any"
                " size, and targets that it takes"
            ) from error
        needs_derivatives = torch.is_grad_enabled() and x.requires_grad
        _check_value(self.loss, value, with_derivatives=needs_derivatives)
        return value.reshape(())


def _check_value(loss: Loss, value: object, *, with_derivatives: bool) -> None:
    """Raises ConfigError unless what the loss returned is one real number, and if
    `with_derivatives` one that depends on the output.
    """
    name = name_of(loss)
    if not isinstance(value, Tensor):
        if value is None:
            returned = "None"
        else:
            returned = f"a {type(value).__name__}"
        raise ConfigError(
            f"loss=: {name} returned {returned}: return a tensor with one number, such as a mean"
        )
    shape = tuple(value.shape)
    if value.numel() != 1:
        raise ConfigError(
            f"loss=: {name} returned a tensor {shape}: return one number, such as its mean"
        )
    if not value.is_floating_point():
        kind = str(value.dtype).removeprefix("torch.")
        raise ConfigError(
            f"loss=: {name} returned a tensor {shape} of {kind}, which has no derivatives: return"
            " a real number of a floating-point type"
        )
    if with_derivatives and not value.requires_grad:
        raise ConfigError(
            f"loss=: {name} returned a number without derivatives by the model's output: leave out"
            " detach(), item() and torch.no_grad(), and compute it from the output"
        )


def name_of(loss: Loss) -> str:
    """The name of the user's function, or of the class of a module."""
    inner = inspect.unwrap(loss)
    name: str = getattr(inner, "__name__", type(inner).__name__)
    return name


class _Apart(Tensor):
    """An output that is no function of the last state alone. Any use raises ConfigError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ConfigError(
            "loss=: it reads an output of the model that is no function of the last state alone,"
            " such as the auxiliary loss of experts, so its gradients along the depth are unknown:"
            " give a loss of the other outputs"
        )


def of_last_state(loss: Loss, apart: Collection[int]) -> Loss:
    """The loss, for which each output `apart` is an `_Apart`."""
    if not apart:
        return loss

    @functools.wraps(loss)
    def loss_of_the_rest(outputs: Any, targets: Any) -> Tensor:
        unknown = {id(x) for i, x in enumerate(tensors_in(outputs)) if i in apart}

        def marked(x: Any) -> Any:
            if id(x) in unknown:
                return x.detach().as_subclass(_Apart)
            return x

        return loss(tree_map(marked, outputs), targets)

    return loss_of_the_rest


def with_targets_like_outputs(loss: Loss, tensor: Tensors) -> Loss:
    """The loss of a module whose outputs count tokens before sequences: it gets targets (sequences,
    tokens, ...) with their axes in that order too. Targets that have it already stay.
    """

    @functools.wraps(loss)
    def loss_of_turned(outputs: Any, targets: Any) -> Tensor:
        y = tensor(outputs)  # sequences first
        if y is not None and isinstance(targets, Tensor) and targets.shape[:2] == y.shape[:2]:
            targets = targets.transpose(0, 1)
        return loss(outputs, targets)

    return loss_of_turned


def _stand_in(tensor: Tensors, *, random: bool) -> Loss:
    """<P, y>/N for the model's output y of N entries: P = 1, or fixed Gaussian numbers. It
    ignores targets.
    """

    def loss(outputs: Any, targets: Any) -> Tensor:
        y = tensor(outputs)
        if y is None:
            raise ConfigError(
                f"the model returns a {type(outputs).__name__} without a known tensor: give loss="
            )
        if random:
            return (random_states(y) * y).mean()
        return y.mean()

    return loss


def _tied_cross_entropy(tensor: Tensors, table: nn.Embedding) -> Loss:
    """The mean cross-entropy, in nats, of logits <e_v, y_i> for the embeddings e_v. Targets of -1
    are left out.
    """

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        y = tensor(outputs)
        weight = table.weight
        shape = None
        if y is not None:
            shape = tuple(y.shape)
        if y is None or y.shape[-1] != weight.shape[-1] or y.shape[:-1].numel() != targets.numel():
            raise ConfigError(
                f"the model's output {shape} cannot be multiplied with the embeddings"
                f" {tuple(weight.shape)} for each token: choose the loss mean or random"
            )
        logits = (y @ weight.T).flatten(0, -2)
        return F.cross_entropy(logits, counted(targets).flatten(), ignore_index=-1)

    return loss


def _no_loss(output: Any, targets: Any) -> Tensor:
    """In place of the loss of a model that was opened without one. Raises ConfigError."""
    names = ", ".join(name for name in LOSS_NAMES if name != "none")
    raise ConfigError(
        f"the model was opened with loss='none': open it with one of {names}, or with a function"
    )


def _check_function(loss: object) -> None:
    """Raises ConfigError for a class of losses, and for what cannot be called."""
    if isinstance(loss, type):
        raise is_class("loss", loss)
    if not callable(loss):
        raise ConfigError(
            f"loss = {shown(loss)}: choose one of {', '.join(LOSS_NAMES)}, or give a function of"
            " the model's output and the targets"
        )


def with_loss(
    model: AnyModel, loss: str | Loss | None, *, predicts: bool, causal: bool
) -> tuple[AnyModel | ModelWithLoss, str]:
    """The model with that loss, and the loss's name. `loss` is a name in `LOSS_NAMES`, or a
    function of outputs and targets, named "given".

    None is the loss that the model was trained for if its head gives logits of tokens, and
    otherwise the stand-in "random". Raises ConfigError for an unknown name, for a loss over tokens
    if the model reads none, and for an output that gives no logits.
    """
    is_chosen = loss is not None
    if loss is None:
        if not predicts:
            loss = "random"
        elif causal:
            loss = "next"
        else:
            loss = "mlm"
    if not isinstance(loss, str):
        _check_function(loss)
        if isinstance(model, Imported):
            loss = of_last_state(loss, model.adapter.apart)
            if getattr(model.adapter, "output_has_tokens_first", False):
                loss = with_targets_like_outputs(loss, model.adapter.tensor)
        return ModelWithLoss(model, loss), "given"
    if loss not in LOSS_NAMES:
        raise ConfigError(
            f"loss {loss!r} is not known: choose one of {', '.join(LOSS_NAMES)}, or in Python give"
            " a function"
        )
    if isinstance(model, Imported):
        tensor = model.adapter.tensor
    else:
        tensor = tensor_in
    if loss in ("mean", "random"):
        stand_in = _stand_in(tensor, random=loss == "random")
        return ModelWithLoss(model, stand_in, is_chosen=is_chosen), loss
    if loss == "none":
        return ModelWithLoss(model, _no_loss), loss
    if predicts:
        return model, loss
    table = _embeddings(model)
    if isinstance(model, Imported):
        with torch.no_grad():
            y = tensor(model.adapter.outputs(model.adapter.like().unsqueeze(0)))
        if y is None or y.shape[-1] != table.weight.shape[-1]:
            if y is None:
                shape = "no known tensor"
            else:
                shape = f"{tuple(y.shape)} for one sequence"
            raise ConfigError(
                f"loss {loss!r} needs logits (sequences, tokens, {table.num_embeddings}) or states"
                f" (sequences, tokens, {table.embedding_dim}), but the model returns {shape}:"
                " return one of these, choose the loss mean or random, or in Python give a"
                " function of its output"
            )
    return ModelWithLoss(model, _tied_cross_entropy(tensor, table)), loss


def _embeddings(model: AnyModel) -> nn.Embedding:
    """The embedding table of the tokens."""
    if isinstance(model, Imported):
        size = model.vocabulary
    else:
        size = model.config.vocab_size
    if size:
        for part in model.modules():
            if isinstance(part, nn.Embedding) and part.num_embeddings == size:
                return part
    raise ConfigError(
        "the model embeds no tokens, so it cannot predict any: choose the loss mean or random,"
        " or give a function"
    )
