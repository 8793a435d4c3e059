"""A model as a chain of parts: the embedding, the sublayers, and the head with the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.on_demand import (
    WeightKey,
    altered,
    clear_shelves,
    has_weights_on_demand,
    readers_on_demand,
)
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.measure.walk import Model, own_loss
from ctrans.model.gpt import next_token_loss
from solvers import ConfigError

EMBEDDING = "the embedding"
HEAD = "the head"


class ModelParts:
    """The parts of a model. Part 0 is the embedding, part k + 1 sublayer k, and the last the head.

    - `targets`: those of its loss; None for a model that is compared without one
    - `size`: how many sublayers are one part, 1 or all those of a block
    - `by_states`: whether what a part adds is the difference of two states, as it is for states
      that were recorded
    """

    def __init__(self, model: Model, targets: Any, *, size: int = 1, by_states: bool = False):
        self.model = model
        self.depth = model.depth
        self.targets = targets
        self.by_states = by_states
        self.sublayers: list[Sublayer] = list(model.depth.sublayers)
        self.lengths = model.depth.lengths
        self.size = size
        self.starts = range(0, len(self.sublayers), size)

    def __len__(self) -> int:
        return len(self.starts) + 2

    @property
    def names(self) -> list[str]:
        """Each part in words."""
        per_block = self.depth.per_block
        inner = []
        for k in self.starts:
            name = f"{self.depth.unit} {k // per_block}"
            kind = self.sublayers[k].kind
            if self.size == 1 and (per_block > 1 or kind != "part"):
                name += f", {kind}"
            inner.append(name)
        return [EMBEDDING, *inner, HEAD]

    def sublayers_of(self, part: int) -> list[Sublayer]:
        """The sublayers of a part; none of the embedding and the head."""
        if part in (0, len(self) - 1):
            return []
        start = self.starts[part - 1]
        return self.sublayers[start : start + self.size]

    def states(self, tokens: Any) -> Iterator[Tensor]:
        """The state behind the embedding, and behind each part of sublayers."""
        x = self.model.embed(tokens)
        yield x
        for part in range(1, len(self) - 1):
            x = self.through(part, x)
            yield x

    def through(self, part: int, x: Tensor) -> Tensor:
        """The state behind a part of sublayers."""
        start = self.starts[part - 1]
        for k in range(start, start + self.size):
            x = self.sublayers[k].step(x, self.lengths[k])
        return x

    def outputs(self, part: int, given: Any) -> list[Tensor]:
        """What a part makes of its input: of a sublayer what it adds and the next state, of the
        head the logits, or the loss where there are none.
        """
        if part == 0:
            return [self.model.embed(given)]
        if part == len(self) - 1:
            return [self._of_head(given)]
        if self.by_states or self.size > 1:
            following = self.through(part, given)
            return [following - given, following]
        sublayer = self.sublayers[part - 1]
        length = self.lengths[part - 1]
        entered = sublayer.enter(given)
        raw = sublayer(entered)
        return [length * raw, sublayer.moved(entered, raw, length)]

    def last_from(self, part: int, given: Any) -> Tensor:
        """The last state if the parts from this one on, before the head, read that input."""
        x: Tensor = given
        if part == 0:
            x = self.model.embed(given)
            part = 1
        for later in range(part, len(self) - 1):
            x = self.through(later, x)
        return x

    def lasts_from(self, states: Sequence[Tensor]) -> list[Tensor]:
        """The last state from each of these on, of which number k is behind part k."""
        tails = Tails(self)
        for part, x in enumerate(states, 1):
            tails.enter(part, x)
        return tails.states

    def loss_of(self, x: Tensor) -> float:
        """L(X_K). Logits of few digits are widened first, as the losses of trainings do."""
        loss_of_model = own_loss(self.model)
        if loss_of_model is not None:
            return float(loss_of_model(x, self.targets))
        return self.loss_of_logits(self.model.head(x))

    def loss_of_logits(self, logits: Tensor) -> float:
        """Their mean cross-entropy."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if int(self.targets.max()) >= logits.shape[-1]:
            raise ConfigError(
                f"targets run to {int(self.targets.max())}, and the logits end at"
                f" {logits.shape[-1] - 1}: give targets of the model's vocabulary"
            )
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
        adapter = self._adapter
        if adapter is not None:
            own: nn.Module = adapter.model
            return own
        inner: Any = self.model
        while isinstance(getattr(inner, "model", None), nn.Module):
            inner = inner.model
        if isinstance(inner, nn.Module):
            return inner
        return None

    @property
    def _adapter(self) -> Any:
        """What runs a model of another library; None for our own."""
        inner: Any = self.model
        while inner is not None:
            adapter = getattr(inner, "adapter", None)
            if adapter is not None:
                return adapter
            inner = getattr(inner, "model", None)
        return None

    def forget(self) -> None:
        """Drops what an opened model remembers of masks and positions."""
        if self._adapter is not None:
            self._adapter.forget()

    def part_of(self) -> dict[WeightKey | int, int]:
        """The number of the part of each parameter and buffer, by its id, and of each weight on
        demand, by its key; those outside of the blocks are left out.
        """
        found: dict[WeightKey | int, int] = {}
        for part in range(len(self)):
            for sublayer in self.sublayers_of(part):
                for tensor in (*sublayer.parameters(), *sublayer.buffers()):
                    found.setdefault(id(tensor), part)
                for _, weight in readers_on_demand(sublayer):
                    found.setdefault(weight.key, part)
        return found

    def keys_of(self, part: int, given: Any) -> set[WeightKey]:
        """The weights on demand of a part; of the embedding and the head those that it reads."""
        module = self.module
        if module is None or not has_weights_on_demand(module):
            return set()
        keys: set[WeightKey] = set()
        if self.sublayers_of(part):
            for sublayer in self.sublayers_of(part):
                for _, weight in readers_on_demand(sublayer):
                    if not isinstance(weight.key, int):
                        keys.add(weight.key)
            return keys

        def noted(key: WeightKey, weight: Tensor) -> Tensor:
            keys.add(key)
            return weight

        with altered(module, noted):
            self.outputs(part, given)
        return keys

    def clear(self) -> None:
        """Drops the weights on demand that are in memory."""
        if self.module is not None:
            clear_shelves(self.module)


class Tails:
    """Passes through a model's parts that begin at each of them, all on their way together, so that
    each part's weights are read once.
    """

    def __init__(self, parts: ModelParts):
        self.parts = parts
        self.states: list[Tensor] = []

    def enter(self, part: int, given: Any) -> None:
        """A pass begins before this part, and all go through it. They stay before the head."""
        if part == 0:
            self.states.append(self.parts.model.embed(given))
            return
        self.states.append(given)
        if part < len(self.parts) - 1:
            self.states = [self.parts.through(part, x) for x in self.states]
