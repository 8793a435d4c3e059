"""What a diagnosis looks at where there is a loss: log Z, costates, the decay that holds the weights, and a matrix with two uses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.control.model_check import threshold_at
from ctrans.depth import Depth
from ctrans.stability.backward.parameter_gradients import leaves, outside, pull, tracked
from ctrans.stability.diagnosis.down import Readings, add
from ctrans.stability.diagnosis.reading import Reading, place_of
from ctrans.walk import Instrument, Model, ModelOfModules, StepContextBack, Turn, own_loss, terminal_loss
from solvers import ConfigError
from solvers.run import finite

HEAD = "the head"


class Logits(Instrument):
    """log Z - log V, the loss less log V, and whether the loss is finite.

    The first two are for heads with a logit for every target: of a loss that is a model's own, only the last is known.
    """

    def head(self, model: Model, at: Turn) -> None:
        self._found: Readings = {}
        if not math.isfinite(at.loss):
            add(self._found, "entries that are not finite", Reading(1.0, HEAD, f"the loss is {at.loss}", None))
            return
        if own_loss(model) is not None:
            raise ConfigError(
                "the loss here is a stand-in or one that was given, and log Z and guessing are of a cross-entropy of logits"
            )
        logits = model.head(at.x).double()
        guessing = math.log(logits.shape[-1])
        drift = float(torch.logsumexp(logits, -1).mean()) - guessing
        excess = at.loss - guessing
        add(
            self._found,
            "log Z",
            Reading(abs(drift), HEAD, f"log Z = {drift + guessing:.3g} in the mean, log V = {guessing:.3g}", None),
        )
        said = f"the loss is {at.loss:.3g} nats, and guessing has {guessing:.3g}"
        add(self._found, "loss over guessing", Reading(excess, HEAD, said, None))

    def figures(self) -> Readings:
        return self._found


class CostatesByDepth(Instrument):
    """Costates dL/dX_k with entries that are not finite."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._found = depth, Readings()

    def backward(self, at: StepContextBack) -> None:
        bad = int((~at.before.isfinite()).sum())
        if bad and finite(at.p) and finite(at.x):  # where it began
            said = f"{bad} of {at.before.numel()} entries of the costate dL/dX at its start"
            place = place_of(self._depth, at.k)
            add(self._found, "entries that are not finite", Reading(float(bad), place, said, at.k))

    def figures(self) -> Readings:
        return self._found


class DecayOverThreshold(Instrument):
    """The weight decay over dt lam* of every sublayer without a norm behind it or around it, at the discrete model's costates."""

    def __init__(self, weight_decay: float):
        self.weight_decay = weight_decay

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._bounded, self._unknown = depth, 0, 0
        self._found: Readings = {}

    def backward(self, at: StepContextBack) -> None:
        if at.sublayer.output_norm is not None or at.sublayer.state_norm is not None:
            self._bounded += 1
            return
        if not (finite(at.x) and finite(at.before)):
            return
        x, p = at.met
        threshold = threshold_at(at.sublayer, x, at.h * at.sublayer.pulled(p.flatten(0, -2)))
        if threshold is None:
            self._unknown += 1
            return
        share = self.weight_decay / threshold.lower if threshold.lower else math.inf
        said = f"dt lam* is at least {threshold.lower:.3g}, and the decay is {self.weight_decay:g}"
        add(self._found, "decay over dt lam*", Reading(share, place_of(self._depth, at.k), said, at.k))

    def figures(self) -> Readings:
        if not self._found:
            why = [f"{self._bounded} have a norm behind or around them"] if self._bounded else []
            why += (
                [f"{self._unknown} show no path of two factors (a gate or a scale by channel makes a third)"]
                if self._unknown
                else []
            )
            raise ConfigError(f"no sublayer has a known dt lam*: {' and '.join(why) or 'states are not finite'}")
        return self._found


class TiedGradients(Instrument):
    """cos between the loss's two gradients in a matrix that embedding and head share: the part through the head, and that through X_0.

    Over the rows that the embedding uses on this text, as all others have the head's part alone.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth = depth
        self._head: dict[int, Tensor] = {}
        self._found: Readings = {}

    def head(self, model: Model, at: Turn) -> None:
        if self._depth.streamed or not isinstance(model, ModelOfModules):
            return
        self._parts = outside(model)
        with tracked(self._parts) as weights:
            with torch.enable_grad():
                used = leaves(model.embed(at.tokens))
            shared = {key: weight for key, weight in weights.items() if id(weight) in used and weight.dim() == 2}
            gradients: dict[int, Tensor] = {}
            pull(lambda x: terminal_loss(model, x, at.targets), at.x, None, shared, gradients)
        self._head = {key: gradient for key, gradient in gradients.items() if bool(gradient.any())}

    def embedding(self, model: Model, tokens: Tensor, p: Tensor) -> None:
        if not self._head or not isinstance(model, ModelOfModules):
            return
        with tracked(self._parts) as weights:
            shared = {key: weight for key, weight in weights.items() if key in self._head}
            through: dict[int, Tensor] = {}
            pull(lambda zero: model.embed(tokens) + zero, torch.zeros_like(p), p, shared, through)
        names = {id(weight): name for part in [model] for name, weight in _named(part)}
        for key, before in self._head.items():
            after = through[key]
            rows = after.abs().sum(-1) > 0
            a, b = after[rows].double().flatten(), before[rows].double().flatten()
            size = float(a.norm() * b.norm())
            if size:
                cosine = float(a @ b) / size
                said = (
                    f"the gradients through the embedding (length {float(a.norm()):.2g}) and through the head "
                    f"({float(b.norm()):.2g}) have a cosine of {cosine:.2f} over {int(rows.sum())} rows"
                )
                place = f"the tied matrix {names.get(key, '')}".rstrip()
                add(self._found, "cosine of tied gradients", Reading(cosine, place, said, None))

    def figures(self) -> Readings:
        return self._found


def _named(model: ModelOfModules) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters()) if isinstance(model, torch.nn.Module) else []
