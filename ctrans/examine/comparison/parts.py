"""A model as a chain of parts: the embedding, the sublayers, and the head with the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.measure.walk import Model, own_loss
from ctrans.model.gpt import next_token_loss
from solvers import ConfigError

EMBEDDING = "the embedding"
HEAD = "the head"


class ModelParts:
    """The parts of a model. Part 0 is the embedding, part k + 1 sublayer k, and the last the head.

    `targets` are those of its loss; None for a model that is compared without one.
    """

    def __init__(self, model: Model, targets: Any):
        self.model = model
        self.depth = model.depth
        self.targets = targets
        self.sublayers: list[Sublayer] = list(model.depth.sublayers)
        self.lengths = model.depth.lengths

    def __len__(self) -> int:
        return len(self.sublayers) + 2

    @property
    def names(self) -> list[str]:
        """Each part in words."""
        per_block = self.depth.per_block
        inner = []
        for k, sublayer in enumerate(self.sublayers):
            name = f"block {k // per_block}"
            if per_block > 1 or sublayer.kind != "part":
                name += f", {sublayer.kind}"
            inner.append(name)
        return [EMBEDDING, *inner, HEAD]

    def states(self, tokens: Any) -> Iterator[Tensor]:
        """X_0 to X_K."""
        x = self.model.embed(tokens)
        yield x
        for sublayer, length in zip(self.sublayers, self.lengths, strict=True):
            x = sublayer.step(x, length)
            yield x

    def outputs(self, part: int, given: Any) -> list[Tensor]:
        """What a part makes of its input: of a sublayer what it adds and the next state, of the
        head the logits, or the loss where there are none.
        """
        if part == 0:
            return [self.model.embed(given)]
        if part == len(self) - 1:
            return [self._of_head(given)]
        sublayer = self.sublayers[part - 1]
        length = self.lengths[part - 1]
        entered = sublayer.enter(given)
        raw = sublayer(entered)
        return [length * raw, sublayer.moved(entered, raw, length)]

    def loss_from(self, part: int, given: Any) -> float:
        """The loss if the parts from this one on read that input."""
        x = given
        if part == 0:
            x = self.model.embed(given)
            part = 1
        for k in range(part - 1, len(self.sublayers)):
            x = self.sublayers[k].step(x, self.lengths[k])
        return self.loss_of(x)

    def loss_of(self, x: Tensor) -> float:
        """L(X_K). Logits of few digits are widened first, as the losses of trainings do."""
        loss_of_model = own_loss(self.model)
        if loss_of_model is not None:
            return float(loss_of_model(x, self.targets))
        logits = self.model.head(x)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return float(next_token_loss(logits, self.targets))

    def _of_head(self, x: Tensor) -> Tensor:
        try:
            return self.model.head(x)
        except (*FOREIGN_ERRORS, ConfigError):
            if self.targets is None:
                raise
            # a loss of one's own may be all that follows the last state
            return torch.tensor(self.loss_of(x))

    @property
    def module(self) -> nn.Module | None:
        """The user's own module, or the GPT."""
        inner: Any = self.model
        while True:
            adapter = getattr(inner, "adapter", None)
            if adapter is not None:
                own: nn.Module = adapter.model
                return own
            within = getattr(inner, "model", None)
            if not isinstance(within, nn.Module):
                break
            inner = within
        if isinstance(inner, nn.Module):
            return inner
        return None

    def part_of(self) -> dict[int, int]:
        """The number of the part of each parameter and buffer, by its id; those outside of the
        blocks are left out.
        """
        found: dict[int, int] = {}
        for k, sublayer in enumerate(self.sublayers):
            for tensor in (*sublayer.parameters(), *sublayer.buffers()):
                found.setdefault(id(tensor), k + 1)
        return found
