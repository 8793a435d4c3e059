"""States that another program recorded, as one side of `compare`: of JAX, Megatron or vLLM.

A recording is a file of safetensors:

- `state.0` to `state.K`: the state behind the embedding and behind each sublayer, or each block
- `tokens`: the token ids that were read, or other inputs
- `targets`, `logits`: if they are known

A recording has no parts that run. So its states are what the parts of the other model read, and its
next states what those are compared with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctrans.base.given_files import check_file
from ctrans.dynamics.weights.on_demand import WeightKey
from ctrans.examine.comparison.parts import ModelParts
from ctrans.interop.stored_weights import FLOATS, read_numbers, stored_weights
from ctrans.measure.walk import own_loss
from ctrans.model.gpt import next_token_loss
from solvers import ConfigError

SUFFIX = ".safetensors"
STATE = re.compile(r"state\.[0-9]{1,6}")
INTEGERS = ("I64", "I32", "I16", "U8", "U16", "U32")
COARSER = (torch.bfloat16, torch.float16)
"""Dtypes whose numbers a file may hold in a wider one."""


@dataclass(frozen=True, eq=False)
class Recording:
    """What was recorded of a model's pass; the module's docstring says what is what."""

    path: Path
    states: list[Tensor]
    tokens: Tensor
    targets: Tensor | None = None
    logits: Tensor | None = None


def is_recording(given: Any) -> bool:
    """Whether it is a recording, or the path of a file of safetensors."""
    if isinstance(given, str | Path):
        return Path(given).suffix == SUFFIX
    return isinstance(given, Recording)


def read_recording(path: Path) -> Recording:
    """The recording in a file of safetensors. Raises ConfigError for a file that is no such file or
    not complete, that lacks `tokens` or a state, and for tensors of other kinds.
    """
    check_file(path)
    stored = stored_weights([path])
    numbers: dict[int, str] = {}
    for name in filter(STATE.fullmatch, stored):
        other = numbers.setdefault(int(name.split(".")[1]), name)
        if other != name:
            raise ConfigError(
                f"{str(path)!r} holds {other} and {name}: record each state under one name"
            )
    if not numbers or sorted(numbers) != list(range(len(numbers))):
        which = "no state" if not numbers else f"{len(numbers)} states, and not state.0 to the last"
        raise ConfigError(
            f"{str(path)!r} holds {which}: a recording has tensors state.0, state.1, .., behind the"
            " embedding and behind each sublayer or block"
        )
    if "tokens" not in stored:
        raise ConfigError(
            f"{str(path)!r} holds no tensor tokens: record what the model read, so that ctrans runs"
            " the other one on the same"
        )
    names = [numbers[k] for k in range(len(numbers))]
    for name in (*names, "logits"):
        if name in stored and stored[name].dtype not in FLOATS:
            raise ConfigError(
                f"{str(path)!r} holds {name} as {stored[name].dtype}: record floating-point numbers"
            )
    for name in ("tokens", "targets"):
        if name in stored and stored[name].dtype not in (*INTEGERS, *FLOATS):
            raise ConfigError(
                f"{str(path)!r} holds {name} as {stored[name].dtype}: record integers"
            )
        if name in stored and len(stored[name].shape) < 1:
            raise ConfigError(
                f"{str(path)!r} holds {name} as a single number: record an axis of sequences and"
                " one of tokens"
            )
    shapes = sorted({stored[name].shape for name in names})
    if len(shapes) > 1 or len(shapes[0]) < 2:
        raise ConfigError(
            f"{str(path)!r} holds states of the shapes {', '.join(map(str, shapes))}: record all of"
            " one shape (sequences, tokens, width)"
        )
    wanted = {*names, "tokens", "targets", "logits"}
    found = read_numbers({name: stored[name] for name in stored if name in wanted})
    return Recording(
        path,
        _in_own_digits([found[name] for name in names]),
        _as_ids(found["tokens"]),
        _as_ids(found["targets"]) if "targets" in found else None,
        found.get("logits"),
    )


def _as_ids(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.long()


def _in_own_digits(states: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in the dtype of fewest digits that holds those of all states: a program of
    bfloat16 may store float32. One state tells little: the rows of a table of bfloat16 are the
    first state of a program of float32.
    """
    widest = max((x.dtype for x in states), key=_digits)
    for dtype in COARSER:
        if all(torch.equal(x.to(dtype).to(widest), x.to(widest)) for x in states):
            return [x.to(dtype) for x in states]
    return [x.to(widest) for x in states]


def _digits(dtype: torch.dtype) -> float:
    return 1 / torch.finfo(dtype).eps


class RecordedParts:
    """A recording as the parts of a model, beside the parts of the model that runs. `like` is a
    state of that model.
    """

    module = None

    def __init__(self, recording: Recording, running: ModelParts, like: Tensor):
        self.path = recording.path
        self.running = running
        self.targets = running.targets
        self.like = like
        self.own_states = [x.to(like.device) for x in recording.states]
        self.logits = None
        self.names = running.names[:-1]
        if recording.logits is not None:
            self.logits = recording.logits.to(like.device)
            self.names = running.names

    def __len__(self) -> int:
        return len(self.names)

    def states(self, tokens: Any) -> Iterator[Tensor]:
        """The states that were recorded."""
        del tokens
        yield from self.own_states

    def outputs(self, part: int, given: Any) -> list[Tensor]:
        """What was recorded behind that part."""
        del given
        if part == 0:
            return [self.own_states[0]]
        if part == len(self.own_states) and self.logits is not None:
            return [self.logits]
        behind = self.own_states[part].double()
        return [behind - self.own_states[part - 1].double(), behind]

    def loss_of(self, x: Tensor) -> float:
        """The loss of the recorded logits. Without them, or for a loss of another kind, that of the
        other model's head.
        """
        if self.logits is None or own_loss(self.running.model) is not None:
            return self.running.loss_of(x.to(self.like.dtype))
        logits = self.logits
        if logits.dtype in COARSER:
            logits = logits.float()
        return float(next_token_loss(logits, self.targets))

    def check_logits(self, own: Tensor) -> None:
        """Raises ConfigError for recorded logits of another shape than the other model's own."""
        if self.logits is None or self.logits.shape == own.shape:
            return
        raise ConfigError(
            f"{str(self.path)!r} holds logits of shape {tuple(self.logits.shape)}, and the other"
            f" model's are {tuple(own.shape)}: record such ones, without padding, or leave them out"
        )

    def part_of(self) -> dict[WeightKey | int, int]:
        """It has no weights."""
        return {}


def parts_beside(recording: Recording, model: Any, targets: Any) -> ModelParts:
    """The model in the parts between the states of the recording. Raises ConfigError if those are
    neither its sublayers nor its blocks.
    """
    sublayers = len(model.depth.sublayers)
    per_block = model.depth.per_block
    between = len(recording.states) - 1
    for size in dict.fromkeys((1, per_block)):
        if between * size == sublayers:
            return ModelParts(model, targets, size=size, by_states=True)
    allowed = f"each of the {sublayers} sublayers ({sublayers + 1})"
    if per_block > 1:
        allowed += f" or {sublayers // per_block} blocks ({sublayers // per_block + 1})"
    raise ConfigError(
        f"{str(recording.path)!r} holds {between + 1} states: record those behind the embedding and"
        f" behind {allowed}"
    )
