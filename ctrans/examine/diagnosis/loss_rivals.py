"""What a loss is worth: beside that of guessing, of counting tokens and pairs of tokens, and of the
same predictions for shuffled targets.

Counting is held to the same standard as a model: the token that is to be predicted is left out of
the counts. With c of a token in the other N - 1, and V tokens,

    p_1(y) = (c(y) + 1)/(N - 1 + V),    p_2(y | x) = (c(x, y) + p_1(y))/(c(x) + 1)

That a loss is too large is said of trained weights alone: untrained ones predict nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctrans.dynamics.depth import Depth
from ctrans.examine.diagnosis.reading import DiagnosticInstrument
from ctrans.interop.class_targets import PROBABILITIES, are_probabilities
from ctrans.measure.walk import Model, Turn, own_loss, terminal_loss
from ctrans.model.gpt import counted

SHUFFLES = 200
"""How often targets are shuffled where the logits are known."""
FEW_SHUFFLES = 16
"""How often the model's own loss is computed of shuffled targets."""
FEWEST_TARGETS = 8
"""Fewer targets show nothing."""
DEVIATIONS = -3.0
"""A loss that is not so many standard deviations from that of shuffled targets is no better."""
HEAD = "the head"
ROLES = ("input_norm", "output_norm", "state_norm")


@dataclass(frozen=True)
class Rivals:
    """Losses in nats of what knows less than the model; None where one is not known.

    - `guessing`: log V
    - `tokens`, `pairs`: of counting tokens, and tokens by the one before
    - `shuffled`, `spread`: the model's loss for shuffled targets, its mean and standard deviation
    """

    guessing: float | None = None
    tokens: float | None = None
    pairs: float | None = None
    shuffled: float | None = None
    spread: float = 0.0

    def __str__(self) -> str:
        named = {
            "guessing has": self.guessing,
            "counting tokens": self.tokens,
            "counting pairs of tokens": self.pairs,
            "this model on shuffled targets": self.shuffled,
        }
        return ", ".join(f"{name} {loss:.3g}" for name, loss in named.items() if loss is not None)

    def against_shuffled(self, loss: float) -> float | None:
        """The loss minus that of shuffled targets, in standard deviations of the latter; None if
        the loss does not depend on the targets' order.
        """
        if self.shuffled is None or not self.spread > 0:
            return None
        return (loss - self.shuffled) / self.spread


class LossBesideRivals(DiagnosticInstrument):
    """The loss in words beside its rivals. Of trained weights also: the loss against that of
    shuffled targets, and if that is passed, against that of counting tokens.
    """

    name = "loss"

    def head(self, model: Model, at: Turn) -> None:
        if not math.isfinite(at.loss):
            return
        if own_loss(model) is None and are_probabilities(model.head(at.x)):
            figure = f"a cross-entropy is {at.loss:.3g} nats, but {PROBABILITIES}"
            self.add("loss on this text", at.loss, figure, place=HEAD)
            return
        rivals = rivals_of(model, at.tokens, at.targets, at.x)
        called = getattr(model, "called", "the loss")
        figure = f"{called} is {at.loss:.3g}"
        if rivals.guessing is not None:
            figure += " nats"
        if str(rivals):
            figure += f"; {rivals}"
        self.add("loss on this text", at.loss, figure, place=HEAD)
        if not looks_trained(self.depth):
            return
        against_shuffled = rivals.against_shuffled(at.loss)
        if against_shuffled is not None:
            self.add("loss against shuffled targets", against_shuffled, figure, place=HEAD)
        if rivals.tokens is not None and not is_shuffled(against_shuffled):
            excess = at.loss - rivals.tokens
            self.add("loss over counting tokens", excess, figure, place=HEAD)


def is_shuffled(deviations: float | None) -> bool:
    """Whether a loss is no better than that of shuffled targets."""
    return deviations is not None and deviations > DEVIATIONS


def rivals_of(model: Model, tokens: Tensor, targets: Any, x: Tensor) -> Rivals:
    """The rivals of a model's loss on these targets. `x` is the last state X_T."""
    if own_loss(model) is None:
        return _of_logits(model.head(x).double(), tokens, targets)
    losses = [float(terminal_loss(model, x, other)) for other in _shuffles(targets, FEW_SHUFFLES)]
    if not losses:
        return Rivals()
    found = torch.tensor(losses, dtype=torch.float64)
    spread = float(found.std())
    if not spread > 1e-12 * float(found.abs().mean()):
        return Rivals()  # it does not read its targets, or they are all alike
    return Rivals(shuffled=float(found.mean()), spread=spread)


def _of_logits(logits: Tensor, tokens: Tensor, targets: Tensor) -> Rivals:
    classes = logits.shape[-1]
    y = counted(targets).flatten()
    kept = y >= 0
    before = tokens.flatten()[kept]
    y = y[kept]
    guessing = math.log(classes)
    if len(y) < FEWEST_TARGETS:
        return Rivals(guessing)
    log_p = logits.flatten(0, -2)[kept].log_softmax(-1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(SHUFFLES):
        other = y[torch.randperm(len(y), generator=generator).to(y.device)]
        losses.append(-log_p.gather(-1, other[:, None]).mean())
    shuffled = torch.stack(losses)
    return Rivals(
        guessing,
        counting_tokens(y, classes),
        counting_pairs(before, y, classes),
        float(shuffled.mean()),
        float(shuffled.std()),
    )


def counting_tokens(y: Tensor, classes: int) -> float:
    """The mean of -log p_1(y)."""
    return float(-_log_p1(y, classes).mean())


def counting_pairs(before: Tensor, y: Tensor, classes: int) -> float:
    """The mean of -log p_2(y | x) for the tokens x before."""
    base = _log_p1(y, classes).exp()
    of_pair = _counts(before * classes + y) - 1
    of_first = _counts(before) - 1
    return float(-((of_pair + base) / (of_first + 1)).log().mean())


def _log_p1(y: Tensor, classes: int) -> Tensor:
    return (_counts(y).double() / (len(y) - 1 + classes)).log()


def _counts(values: Tensor) -> Tensor:
    """How often each entry's value occurs."""
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    how_often: Tensor = counts[place]
    return how_often


def _shuffles(targets: Any, number: int) -> Iterator[Any]:
    """The targets in other orders: whole numbers entry by entry without those that do not count,
    and other numbers row by row.
    """
    if not isinstance(targets, Tensor) or targets.dim() == 0:
        return
    generator = torch.Generator().manual_seed(0)
    whole = not targets.is_floating_point() and not targets.is_complex()
    if whole:
        places = (counted(targets) >= 0).flatten().nonzero().flatten()
    else:
        places = torch.arange(len(targets), device=targets.device)
    if len(places) < FEWEST_TARGETS:
        return
    for _ in range(number):
        order = places[torch.randperm(len(places), generator=generator).to(places.device)]
        if whole:
            other = targets.flatten().clone()
            other[places] = targets.flatten()[order]
            yield other.view(targets.shape)
        else:
            yield targets[order]


def looks_trained(depth: Depth) -> bool | None:
    """Whether most gains of a norm differ from one another, as they do after a training and at no
    usual start; None if the model has no such gains.
    """
    gains: list[Tensor] = []
    for sublayer in depth.sublayers:
        for role in ROLES:
            norm: Any = getattr(sublayer, role)
            if norm is not None and next(norm.parameters(), None) is not None:
                gains.append(norm.gamma.detach())
    if not gains:
        return None
    return any(map(_differ, gains))


def _differ(gain: Tensor) -> bool:
    """Whether most entries are not the middle one."""
    middle = gain.median()
    others = (gain - middle).abs() > 1e-6 * middle.abs()
    return bool(others.double().mean() > 0.5)
