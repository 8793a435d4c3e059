"""The losses of a model on the rows of a batch, by its own forward pass, under an edit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ctrans.dynamics.fields import ExposesHeads
from ctrans.examine.diagnosis.loss_rivals import counting_tokens
from ctrans.examine.search.edit import Act, Changes, Edit, Subject
from ctrans.examine.search.sites import WeightSites
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.losses import ModelWithLoss
from ctrans.interop.opened import STAND_INS, Opened
from ctrans.measure.walk import Model
from ctrans.model.gpt import GPT, counted
from solvers import ConfigError

MEAN_TOLERANCE = 1e-3
"""How far a loss may be from the mean of its values for single sequences."""


class Runs:
    """The model's own forward pass on tokens, and its loss for each target, or for each sequence of
    a loss that is not the cross-entropy of logits.
    """

    def __init__(self, model: Model, tokens: Tensor, targets: Any):
        self.model = model
        self.tokens = tokens
        self.targets = targets
        self.module, self._run, self._loss, self._logits_of = _own(model)
        maps = [sublayer.attention for sublayer in model.depth.sublayers]
        heads = {
            part.field.heads
            for part in maps
            if part is not None and isinstance(part.field, ExposesHeads)
        }
        self.sites = WeightSites(self.module, heads)
        with torch.no_grad():
            output = self._run(tokens[:1])
        logits = self._logits_of(output)
        classes = logits.shape[-1] if logits is not None else 0
        vocabulary = getattr(model, "vocabulary", 0)
        if isinstance(model, GPT):
            vocabulary = model.config.vocab_size
        self.subject = Subject(self.sites, tokens, classes, vocabulary)
        self.kept: list[Edit] = []
        """The edits that the model has in every run."""

    def keep(self, edit: Edit) -> None:
        """From now on the model runs with this edit."""
        self.sites.keep(edit.weights())
        self.kept.append(edit)

    def losses(self, edit: Edit | None, rows: slice) -> Tensor | None:
        """The loss of each target, or sequence, of those rows. None if the edited model does not
        run, or is not finite.
        """
        tokens = self.tokens[rows]
        targets = rows_of(self.targets, rows, len(self.tokens))
        try:
            with torch.no_grad():
                output = self._output(edit, tokens)
                acts = [each.outputs for each in self._with(edit) if each.outputs is not None]
                losses = self._of_output(output, targets, len(tokens), acts)
        except (*FOREIGN_ERRORS, ConfigError) as error:
            if edit is None:
                raise ConfigError(
                    f"the model's own loss does not run on {len(tokens)} sequences:"
                    f" {named_error(error)}"
                ) from error
            return None
        if not bool(losses.isfinite().all()):
            return None
        return losses

    def _output(self, edit: Edit | None, tokens: Tensor) -> Any:
        changed: Changes = {}
        if edit is not None:
            changed = edit.weights()
        edits = self._with(edit)
        for each in edits:
            if each.inputs is not None:
                tokens = each.inputs(tokens)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.sites.with_weights(changed))
            for each in edits:
                stack.enter_context(each.during())
            return self._run(tokens)

    def _with(self, edit: Edit | None) -> list[Edit]:
        if edit is None:
            return self.kept
        return [*self.kept, edit]

    def _of_output(self, output: Any, targets: Any, count: int, acts: Sequence[Act]) -> Tensor:
        if self._loss is None:
            logits = self._logits_of(output)
            if logits is None:
                raise ConfigError("the model returns no logits")
            for act in acts:
                logits = act(logits)
            logits = logits.double().flatten(0, -2)
            wanted = counted(targets).flatten()
            losses = F.cross_entropy(logits, wanted, ignore_index=-1, reduction="none")
            return losses[wanted != -1]
        for act in acts:
            if not isinstance(output, Tensor):
                raise ConfigError("the model returns more than logits")
            output = act(output)
        by_sequence = [
            self._loss(
                rows_of(output, slice(i, i + 1), count), rows_of(targets, slice(i, i + 1), count)
            )
            for i in range(count)
        ]
        return torch.stack([loss.detach().double().reshape(()) for loss in by_sequence])

    @property
    def unit(self) -> str:
        """The unit of the loss in words; empty for the user's own loss, which may have any."""
        if self._loss is None:
            return " nats"
        return ""

    def counting(self) -> float | None:
        """The loss of counting tokens on these targets; None for a loss of other things."""
        if self._loss is not None or not self.subject.classes:
            return None
        wanted = counted(self.targets).flatten()
        return counting_tokens(wanted[wanted != -1], self.subject.classes)

    def check_rows(self) -> None:
        """Raises ConfigError unless the loss of a batch is the mean of that of its sequences."""
        if self._loss is None:
            return
        losses = self.losses(None, slice(None))
        if losses is None:
            return  # not finite, which the search says
        with torch.no_grad():
            whole = float(self._loss(self._run(self.tokens), self.targets))
        mean = float(losses.mean())
        if abs(mean - whole) > MEAN_TOLERANCE * max(1.0, abs(whole)):
            raise ConfigError(
                f"the loss of {len(self.tokens)} sequences, {whole:.4g}, is not the mean of that of"
                f" each, {mean:.4g}, so no edit can be tested by sequence: give a loss that is"
            )


def _own(model: Any) -> tuple[nn.Module, Any, Any, Any]:
    """The module, its forward pass, its loss of all that it returns (None for the cross-entropy of
    logits), and its logits in what it returns.
    """
    loss = None
    inner = model
    if isinstance(model, Opened):
        if model.loss in STAND_INS:
            raise ConfigError(
                f"its loss {model.loss!r} only stands in for that of its training, so that a lower"
                " one shows nothing: give loss="
            )
        inner = model.model
    if isinstance(inner, ModelWithLoss):
        loss = inner.loss
        inner = inner.model
    if isinstance(inner, GPT):
        return inner, lambda tokens: inner(tokens)[0], loss, lambda output: output
    adapter = getattr(inner, "adapter", None)
    own_ends = [getattr(adapter, name, None) for name in ("own_embed", "own_head")]
    if any(each is not None for each in own_ends):
        raise ConfigError(
            "the model was opened with embed= or head=, which its own forward pass does not have:"
            " open it without"
        )
    if adapter is None:
        raise ConfigError(
            f"a {type(inner).__name__} has no forward pass of its own to search: give a GPT or an"
            " opened module"
        )
    return adapter.model, adapter.run, loss, adapter.tensor


def rows_of(value: Any, rows: slice | Tensor, count: int) -> Any:
    """These rows of all tensors that have `count` of them."""

    def cut(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dim() and len(x) == count:
            return x[rows]
        return x

    return tree_map(cut, value)
