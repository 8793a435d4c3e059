"""The diagnosis' instruments that need a loss: log Z, costates, the weight decay threshold, and
tied matrices.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from ctrans.control import own_pass
from ctrans.control.costate import DiscreteCostate
from ctrans.control.model_threshold import factors_of_model, why_no_threshold
from ctrans.control.segment_check import step_threshold_at
from ctrans.control.shown_factors import Factors
from ctrans.examine.diagnosis.reading import DiagnosticInstrument
from ctrans.interop.class_targets import PROBABILITIES, are_probabilities
from ctrans.measure.backward.parameter_gradients import leaves, outside, pulled, tracked
from ctrans.measure.findings import Readings
from ctrans.measure.walk import (
    Model,
    ModelOfModules,
    StepContext,
    StepContextBack,
    Turn,
    of_text,
    own_loss,
    terminal_loss,
)
from solvers import ConfigError
from solvers.run import finite

HEAD = "the head"


class Logits(DiagnosticInstrument):
    """|log Z - log V|, loss - log V, and whether the loss is finite.

    The first two need logits. For a model's own loss only the last is known.
    """

    name = "logits and loss"

    def head(self, model: Model, at: Turn) -> None:
        if not math.isfinite(at.loss):
            self.add("entries that are not finite", 1.0, f"the loss is {at.loss}", place=HEAD)
            return
        if own_loss(model) is not None:
            raise ConfigError(
                "log Z and guessing need a cross-entropy of logits, and this model has another loss"
            )
        output = model.head(at.x)
        if are_probabilities(output):
            raise ConfigError(f"{PROBABILITIES}: return logits, or give loss=")
        logits = of_text(output, self.kept).double()
        guessing = math.log(logits.shape[-1])
        drift = float(torch.logsumexp(logits, -1).mean()) - guessing
        excess = at.loss - guessing
        self.add(
            "log Z",
            abs(drift),
            f"log Z = {drift + guessing:.3g} in the mean, log V = {guessing:.3g}",
            place=HEAD,
        )
        figure = f"the loss is {at.loss:.3g} nats, and guessing has {guessing:.3g}"
        self.add("loss over guessing", excess, figure, place=HEAD)


class CostatesByDepth(DiagnosticInstrument):
    """Costates dL/dX_k with entries that are not finite."""

    name = "costates"

    def backward(self, at: StepContextBack) -> None:
        bad = int((~at.before.isfinite()).sum())
        if bad and finite(at.p) and finite(at.x):  # the segment where it starts
            figure = f"{bad} of {at.before.numel()} entries of the costate dL/dX at its start"
            self.add("entries that are not finite", float(bad), figure, at.k)


class LossOfLess(DiagnosticInstrument):
    """dL/da of each sublayer at a = 1, for a step that is a times as long: <p, X_{k+1} - X_k>, with
    the costate p = dL/dX_{k+1}, or before the norm around the state.

    It is the fall of the loss, in nats for a share of the step. A trained sublayer has nearly none.
    """

    name = "loss of less"

    def backward(self, at: StepContextBack) -> None:
        if not (finite(at.x) and finite(at.y) and finite(at.p)):
            return
        norm = at.sublayer.state_norm
        entered = at.entered.detach()
        if norm is None:
            less = float((at.p * (at.y - entered)).double().sum())
        else:
            with torch.enable_grad():
                a = torch.ones((), dtype=entered.dtype, device=entered.device, requires_grad=True)
                y = norm(entered + a * at.h * at.sublayer(entered).detach())
                less = float(torch.autograd.grad((at.p * y).sum(), a)[0])
        figure = f"a step shorter by 10% lowers the loss by {0.1 * less:.2g} nats to first order"
        self.add("loss of less of a sublayer", less, figure, at.k)


class DecayOverThreshold(DiagnosticInstrument):
    """The weight decay over dt lam* of each sublayer without an output or state norm, at the
    discrete model's costates.
    """

    name = "decay over dt lam*"

    def __init__(self, weight_decay: float):
        self.weight_decay = weight_decay

    def start(self, x0: Tensor) -> None:
        self._turn: tuple[Model, Turn] | None = None
        self._costate = DiscreteCostate()
        self._costate.begin(self.depth, x0)
        self._bounded = 0
        self._unknown = 0
        self._without = 0
        self._states = [x0]
        self._factors = Factors()
        self._no_threshold = ""

    def forward(self, at: StepContext) -> None:
        if not self.depth.streamed:
            self._states.append(at.y)
            self._costate.forward(at)

    def head(self, model: Model, at: Turn) -> None:
        """What `ctrans hjb-check` asks before it shows a penalty: a number needs matrices of the
        segment alone, which the model computes with at any size.
        """
        if self.depth.streamed:
            self._no_threshold = "the weights are loaded on demand, so that no large ones are tried"
            return
        states = self._states[:-1]
        if all(map(finite, states)):
            self._factors = factors_of_model(model, states)
        self._states = []
        self._no_threshold = why_no_threshold(self.depth, self._factors)
        self._turn = model, at
        self._costate.head(model, at)

    def backward(self, at: StepContextBack) -> None:
        if self._turn is not None:
            self._costate.backward(at)
        if at.sublayer.output_norm is not None or at.sublayer.state_norm is not None:
            self._bounded += 1
            return
        if self._no_threshold or not (finite(at.x) and finite(at.p)):
            return
        threshold = step_threshold_at(at.sublayer, at.x, at.p, at.h)
        if threshold is None:
            self._unknown += 1
            return
        if math.isinf(threshold.lower):
            self._without += 1
            return
        if threshold.lower:
            share = self.weight_decay / threshold.lower
        else:
            share = math.inf
        figure = (
            f"dt lam* is at least {threshold.lower:.3g} on this text, and the decay is"
            f" {self.weight_decay:g}"
        )
        self.add("decay over dt lam*", share, figure, at.k)

    def _why_another_loss(self) -> str:
        """Why the costates are not those of the model's own loss; "" if they are."""
        if self._turn is None:
            return ""
        model, at = self._turn
        tested = own_pass.own_loss(model, at.tokens, at.targets, self._costate.figures())
        return tested.otherwise or tested.untested

    def figures(self) -> Readings:
        if self.found:
            why_another = self._why_another_loss()
            if why_another:
                raise ConfigError(f"no dt lam* is known: {why_another}")
        else:
            if self._no_threshold and self._bounded < len(self.depth.sublayers):
                raise ConfigError(f"no dt lam* is known: {self._no_threshold}")
            reasons = {
                "have a norm behind or around them": self._bounded,
                "show no path of factors that decay (a scale by channel adds one without)": (
                    self._unknown
                ),
                "are bounded by no penalty (a gate or a square makes three factors)": self._without,
            }
            why = " and ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
            raise ConfigError(f"no sublayer has a known dt lam*: {why or 'states are not finite'}")
        return self.found


class TiedGradients(DiagnosticInstrument):
    """Cosine between the two gradients of a matrix that embedding and head share: through the head,
    and through X_0.

    It counts the rows that the embedding uses on this text; the others have the head's gradient
    alone.
    """

    name = "tied weights"

    def head(self, model: Model, at: Turn) -> None:
        self._head: dict[Hashable, Tensor] = {}
        if self.depth.streamed or not isinstance(model, ModelOfModules):
            return
        self._parts = outside(model)
        with tracked(self._parts) as weights:
            with torch.enable_grad():
                used = leaves(model.embed(at.tokens))
            shared = {
                key: weight
                for key, weight in weights.items()
                if id(weight) in used and weight.dim() == 2
            }
            gradients = pulled(lambda x: terminal_loss(model, x, at.targets), at.x, None, shared)
        self._head = {key: gradient for key, gradient in gradients.items() if gradient.any()}

    def embedding(self, model: Model, tokens: Tensor, p: Tensor) -> None:
        if not self._head or not isinstance(model, ModelOfModules):
            return
        with tracked(self._parts) as weights:
            shared = {key: weight for key, weight in weights.items() if key in self._head}
            through = pulled(
                lambda zero: model.embed(tokens) + zero, torch.zeros_like(p), p, shared
            )
        names: dict[Hashable, str] = {}
        if isinstance(model, torch.nn.Module):
            names = {id(weight): name for name, weight in model.named_parameters()}
        for key, before in self._head.items():
            after = through[key]
            rows = after.abs().sum(-1) > 0
            a = after[rows].double().flatten()
            b = before[rows].double().flatten()
            size = float(a.norm() * b.norm())
            if size:
                cosine = float(a @ b) / size
                figure = (
                    f"the gradients through the embedding (length {float(a.norm()):.2g}) and"
                    f" through the head ({float(b.norm()):.2g}) have a cosine of {cosine:.2f} over"
                    f" {int(rows.sum())} rows"
                )
                matrix = f"the tied matrix {names.get(key, '')}".rstrip()
                self.add("cosine of tied gradients", cosine, figure, place=matrix)
