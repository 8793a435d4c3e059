"""Which edit of one model's part makes it the other model's: tried by running it.

An edit explains a part if with it the defect is no more than what rounding makes, or a
hundred-thousandth of what it was. First come the edits of `PART_EDITS`. If none explains the part
and the models have modules of the same names, what differs between these is put in each other's
place: attributes, weights, and modules that do not hold the whole part.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.fields import ExposesHeads
from ctrans.dynamics.weights.on_demand import plain_type
from ctrans.examine.comparison.part_edits import PART_EDITS, EditedPart, with_attribute
from ctrans.examine.comparison.part_rounding import (
    DifferenceSize,
    differences,
    ratio_of,
)
from ctrans.examine.comparison.parts import ModelParts
from ctrans.examine.comparison.weight_pairs import WeightPair
from ctrans.examine.search.edit import Edit, Subject
from ctrans.examine.search.sites import WeightSites
from ctrans.interop.foreign_errors import FOREIGN_ERRORS

MOST = 3
"""Explanations that are named."""
NEARLY = 1e-5
"""An edit that leaves at most this share of a defect explains it too: in a model in float64 some
parts may compute in float32, as rotary angles do.
"""
SIMPLE = (int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType)
"""Attributes of these types are compared."""


@dataclass(frozen=True)
class Explanation:
    """An edit that explains a part: in words, and the defect before and with it."""

    words: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"with {self.words} the defect falls from {self.before:.2g} to {self.after:.2g}"


@dataclass(frozen=True)
class EditTrial:
    """A part of a model that runs, and what it must give.

    - `parts`, `number`: the model, and which of its parts
    - `given`: what the part reads
    - `own`, `wanted`: the outputs of the part without an edit, and those of the other model's part
    - `defect`: the defect without an edit, which is one of output number `shown`
    - `rounding`: how much rounding makes of each output
    - `other`: the other model; None for a recording
    """

    parts: ModelParts
    number: int
    given: Any
    own: Sequence[Tensor]
    wanted: Sequence[Tensor]
    defect: float
    shown: int
    rounding: Sequence[DifferenceSize]
    other: ModelParts | None

    def outputs(self, edit: Edit) -> list[Tensor]:
        """What the edited part gives."""
        module = self.parts.module
        assert module is not None, "asked before"
        named = dict(module.named_parameters()) | dict(module.named_buffers())
        weights = {named[name]: tensor for name, tensor in edit.weights().items()}
        own = {id(weight) for part in self._sublayers() for weight in part.parameters()}
        self_contained = bool(weights) and all(id(weight) in own for weight in weights)
        with contextlib.ExitStack() as stack:
            stack.enter_context(with_data(weights))
            if not self_contained:
                # masks and positions that blocks are given may depend on the edit
                self.parts.forget()
                stack.callback(self.parts.forget)
            stack.enter_context(edit.during())
            return self.parts.outputs(self.number, self.given)

    def _sublayers(self) -> Sequence[nn.Module]:
        return self.parts.sublayers_of(self.number)

    def explained(self, edit: Edit, limit: float) -> float | None:
        """The defect with the edit, if rounding explains it, or if next to nothing is left; None if
        not, or if it does not run.
        """
        try:
            edited = self.outputs(edit)
        except FOREIGN_ERRORS:
            return None
        if len(edited) != len(self.own):
            return None
        found = differences(self.wanted, edited)
        ratios = [ratio_of(size, r) for size, r in zip(found, self.rounding, strict=True)]
        before = differences(self.wanted, self.own)
        is_left = any(
            not (ratio <= limit or after.rms <= NEARLY * own.rms)
            for ratio, after, own in zip(ratios, found, before, strict=True)
        )
        if is_left:
            return None
        return self.defect * found[self.shown].rms / before[self.shown].rms


@contextlib.contextmanager
def with_data(weights: dict[Tensor, Tensor]) -> Iterator[None]:
    """Inside, these weights have other numbers, in all modules that hold them."""
    before = {weight: weight.data for weight in weights}
    try:
        for weight, data in weights.items():
            weight.data = data.to(weight.dtype)
        yield
    finally:
        for weight, data in before.items():
            weight.data = data


@torch.no_grad()
def explanations_of(
    trial: EditTrial, tokens: Tensor, pairs: Sequence[WeightPair], limit: float
) -> Iterator[Explanation]:
    """The edits that explain the part, at most `MOST`. `pairs` are weights that differ by more than
    rounding, those of the model that runs first.
    """
    if trial.parts.module is None or trial.explained(Edit("no edit", ""), limit) is not None:
        return
    part = _edited_part(trial, tokens)
    differing = {name for pair in pairs for name in (pair.first_name, pair.second_name)}
    count = 0
    for kinds in (PART_EDITS.values(), [partial(_of_the_other, trial, pairs)]):
        edits = [edit for kind in kinds for edit in _edits(kind, part) if _concerns(edit, trial)]
        # another weight may undo the same, as the sign of the map before: the function would be the
        # other model's, and two weights would be wrong
        if differing:
            edits.sort(key=lambda edit: _is_of_equal_weights(edit, differing))
        for edit in edits:
            after = trial.explained(edit, limit)
            if after is not None:
                yield Explanation(edit.words, trial.defect, after)
                count += 1
            if count == MOST:
                return
        if count:
            return


def _is_of_equal_weights(edit: Edit, differing: set[str]) -> bool:
    """Whether an edit changes weights alone, and none that differs between the models."""
    changed = edit.weights()
    return bool(changed) and not differing.intersection(changed)


def _edits(kind: Callable[[EditedPart], Iterator[Edit]], part: EditedPart) -> Iterator[Edit]:
    """The edits of a kind; none from where it fails for this model."""
    try:
        yield from kind(part)
    except FOREIGN_ERRORS:
        return


def _edited_part(trial: EditTrial, tokens: Tensor) -> EditedPart:
    module = trial.parts.module
    assert module is not None, "asked before"
    heads = {
        sublayer.attention.field.heads
        for sublayer in trial.parts.sublayers
        if sublayer.attention is not None and isinstance(sublayer.attention.field, ExposesHeads)
    }
    model: Any = trial.parts.model
    vocabulary = getattr(model, "vocabulary", 0)
    subject = Subject(WeightSites(module, heads), tokens, vocabulary, vocabulary)
    number = max(0, trial.number - 1) * trial.parts.size // trial.parts.depth.per_block
    return EditedPart(subject, _holders(trial.parts, trial.number), number)


def _holders(parts: ModelParts, number: int) -> dict[str, Any]:
    """The modules that a part may run, each once, and their configurations."""
    named: dict[str, Any] = {}
    seen = set()
    for name, module in _modules(parts, number):
        config = getattr(module, "config", None)
        holders: dict[str, Any] = {name: module}
        if hasattr(config, "__dict__"):
            holders["config"] = config
        for holder_name, holder in holders.items():
            if id(holder) not in seen:
                seen.add(id(holder))
                named[holder_name] = holder
    return named


def _modules(parts: ModelParts, number: int) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a part may run: those of its block, which hold its weights or have none; for
    the embedding and the head, those outside of blocks. Then those of ctrans around them.
    """
    module = parts.module
    assert module is not None, "asked before"
    by_part: dict[int, set[str]] = {}
    names = {id(weight): name for name, weight in module.named_parameters()}
    for part in range(len(parts)):
        of_part = [w for sublayer in parts.sublayers_of(part) for w in sublayer.parameters()]
        by_part[part] = {_block(names[id(w)]) for w in of_part if id(w) in names}
    own = by_part[number] - {""}
    inside = {title for titles in by_part.values() for title in titles} - {""}
    for name, each in module.named_modules():
        title = _block(f"{name}.")
        is_own = title in own if own else title not in inside
        if is_own:
            yield name or type(each).__name__, each
    for sublayer in parts.sublayers_of(number):
        for name, each in sublayer.named_modules():
            yield name or "the sublayer", each


def _block(name: str) -> str:
    """The part of a weight's name up to its first number; "" if it has none."""
    words = name.split(".")
    for i, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: i + 1])
    return ""


def _concerns(edit: Edit, trial: EditTrial) -> bool:
    """Whether the edit may change the part: it does so while it runs, or changes a weight of it or
    one outside of all sublayers.
    """
    module = trial.parts.module
    if edit.during is not contextlib.nullcontext or module is None:
        return True
    if edit.inputs is not None or edit.outputs is not None:
        return False
    places = trial.parts.part_of()
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    try:
        changed = edit.weights()
    except FOREIGN_ERRORS:
        return False
    return any(places.get(id(named[name]), trial.number) == trial.number for name in changed)


def _of_the_other(
    trial: EditTrial, pairs: Sequence[WeightPair], part: EditedPart
) -> Iterator[Edit]:
    """What the other model has at places of the same name: attributes, weights, modules."""
    other = trial.other
    if other is None or other.module is None:
        return
    theirs = _holders(other, trial.number)
    for name, holder in part.modules.items():
        if name in theirs:
            yield from _attributes(name, holder, theirs[name])
    for pair in pairs:
        words = f"the second model's {pair.second_name}"
        yield Edit(words, pair.first_name, partial(_of_pairs, [pair]))
    if len(pairs) > 1:
        words = f"the second model's {len(pairs)} weights that differ"
        yield Edit(words, "", partial(_of_pairs, pairs))
    for name, module in part.modules.items():
        their_module = theirs.get(name)
        if isinstance(module, nn.Module) and isinstance(their_module, nn.Module):
            for edit, inner in _children(name, module, their_module):
                if not _is_all_of(inner, trial):
                    yield edit


def _is_all_of(module: nn.Module, trial: EditTrial) -> bool:
    """Whether the module holds all matrices of the part: that the part computes otherwise because
    it is another one is no explanation.
    """
    own = {id(weight) for weight in module.parameters()}
    matrices = [
        weight
        for sublayer in trial.parts.sublayers_of(trial.number)
        for weight in sublayer.parameters()
        if weight.dim() > 1
    ]
    return bool(matrices) and all(id(weight) in own for weight in matrices)


def _of_pairs(pairs: Sequence[WeightPair]) -> dict[str, Tensor]:
    return {pair.first_name: pair.second.detach() for pair in pairs}


def _children(name: str, module: nn.Module, other: nn.Module) -> Iterator[tuple[Edit, nn.Module]]:
    """Modules of another class at the same place, each with the one that it replaces."""
    theirs = dict(other.named_children())
    for leaf, inner in module.named_children():
        instead = theirs.get(leaf)
        if instead is None or plain_type(instead) is plain_type(inner):
            continue
        kinds = f"{plain_type(instead).__name__} in place of {plain_type(inner).__name__}"
        words = f"the second model's {name}.{leaf}, {kinds}"
        yield Edit(words, name, during=partial(_child, module, leaf, instead)), inner


def _attributes(name: str, module: Any, other: Any) -> Iterator[Edit]:
    """Attributes that differ: numbers, words and functions."""
    for attribute, value in list(vars(module).items()):
        if attribute.startswith("_") or attribute == "training" or attribute not in vars(other):
            continue
        instead = vars(other)[attribute]
        if isinstance(value, SIMPLE) and isinstance(instead, SIMPLE) and value != instead:
            yield with_attribute(name, module, attribute, instead)


@contextlib.contextmanager
def _child(module: nn.Module, leaf: str, instead: nn.Module) -> Iterator[None]:
    before = module._modules[leaf]
    module._modules[leaf] = instead
    try:
        yield
    finally:
        module._modules[leaf] = before
