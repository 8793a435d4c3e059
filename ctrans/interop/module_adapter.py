"""Any `nn.Module` around its blocks: run on an example input, which stands in wherever only the shape of the state matters."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.block_calls import (
    Call,
    Running,
    StateForm,
    intercepted,
    passing,
    recorded_until,
    tensors_in,
    without_cache,
)
from ctrans.interop.block_parts import token_axis_is_first
from ctrans.interop.contexts import IMPLEMENTATION
from ctrans.interop.find_sequence import find_sequence
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.recognise import Structure, recognise
from ctrans.interop.recorded_calls import Template, plain_kernels, watched
from ctrans.interop.tolerances import tolerance
from ctrans.interop.transformers_adapter import at_block, seen, tensor_in
from solvers import ConfigError

Example = Tensor | Mapping[str, Any]
Embed = Callable[[Tensor], Tensor]
Head = Callable[[Tensor], Any]
KEPT = 8
"""For how many shapes of states the contexts are kept."""


class ModuleAdapter:
    """A module that says nothing of itself: its blocks, its first state and its output are seen when it reads the example.

    `example` is what it reads, or its keyword arguments, of which the first is what is put in the place of tokens; a mapping that is no
    keyword arguments of its forward is the one argument. `embed` and `head` take the place of what the module does before its blocks
    and after them.
    """

    context = None

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, example: Example, embed: Embed | None = None, head: Head | None = None
    ):
        self.model: Any = model
        self.own_embed, self.own_head = embed, head
        if isinstance(example, Mapping) and len(example) == 1 and isinstance(inner := next(iter(example.values())), Mapping):
            example = inner  # of an argument that is one mapping, by its name
        self.named = dict(example) if isinstance(example, Mapping) else None
        self.as_one = self.named is not None and not _fits(model, self.named)
        main = next(iter(self.named.values())) if self.named else example
        if not isinstance(main, Tensor) or main.dim() < 2:
            raise ConfigError(
                f"example=: {type(main).__name__} is no batch of inputs: give a tensor whose first axis is that of sequences or images, "
                "or the keyword arguments of a forward pass, such a tensor first"
            )
        self.example, self.tokens_first = main, False
        path, form = self._sequence(anatomy)
        self.anatomy = Anatomy(path, anatomy.attention, anatomy.ffn)
        self.form = self._turned(form)
        self.vocabulary = 0 if main.is_floating_point() else self._vocabulary()

    @property
    def family(self) -> str:
        return "module"

    @property
    def reads(self) -> Sequence[int]:
        return self.example.shape[1:]

    @property
    def row(self) -> Tensor:
        return self.example[0]

    def like(self) -> Tensor:
        return self._like

    def predicts(self) -> bool:
        if not self.vocabulary:
            return False
        with torch.no_grad(), plain_kernels():
            y = self.tensor(self.outputs(self._like.unsqueeze(0)))
        return y is not None and y.dim() == 3 and y.shape[-1] == self.vocabulary

    def blocks(self) -> list[nn.Module]:
        assert self.anatomy.blocks is not None, "it was found"
        part: Any = self.model.get_submodule(self.anatomy.blocks)
        return list(part)

    def structures(self) -> tuple[list[Structure], Tensor]:
        blocks, found = self.blocks(), list[Structure]()
        with plain_kernels():
            calls = recorded_until(blocks, len(blocks) - 1, lambda: self.run(self.example), self.form)
            calls = [without_cache(call) for call in calls]
            try:
                for i, (block, call) in enumerate(zip(blocks, calls, strict=True)):
                    with at_block(i):
                        found.append(seen(recognise(block, call, self.anatomy, self.form), call.x))
            except FOREIGN_ERRORS as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"a {type(blocks[0]).__name__} cannot be run alone on another state ({named_error(error)})"
                ) from None
        self.tokens, self._like = calls[0].x.shape[-2], torch.zeros_like(calls[0].x[0])
        return found, calls[0].x

    def contexts(self, structures: Sequence[Structure]) -> SeenContexts:
        paths = []
        for block, structure in zip(self.blocks(), structures, strict=True):
            names = {part: path for path, part in block.named_modules()}
            paths.append(names[structure.called] if structure.called is not None else "")
        return SeenContexts(self, tuple(paths))

    def run(self, tokens: Tensor) -> Any:
        """A forward pass on these inputs, what else the example has being as there, for as many sequences.

        Numbers are given in the type and on the device that the module has now. Raises ConfigError for whatever the module raises.
        """
        given = self._like_the_weights(tokens.transpose(0, 1) if self.tokens_first else tokens)
        try:
            if self.named is None:
                return self.model(given)
            first, *others = self.named
            rest = {name: self._like_the_weights(self._as_many(self.named[name], len(tokens))) for name in others}
            return self.model({first: given, **rest}) if self.as_one else self.model(**{first: given}, **rest)
        except ConfigError:
            raise
        except FOREIGN_ERRORS as error:
            read = f"a tensor {tuple(given.shape)} of {str(given.dtype).removeprefix('torch.')}"
            others = [] if self.named is None else list(self.named)[1:]
            beside = f" with {', '.join(others)} as in the example" if others else ""
            raise ConfigError(
                f"example=: {type(self.model).__name__} does not run on {read}{beside} ({named_error(error)}): give an input "
                "that it reads"
            ) from error

    def embed(self, tokens: Tensor) -> Tensor:
        axes = self.example.dim() - 1
        lead = tokens.shape[: tokens.dim() - axes]
        flat = tokens.reshape(-1, *tokens.shape[tokens.dim() - axes :])
        if self.own_embed is not None:
            x = self.own_embed(flat)
        else:
            calls = self._calls(flat)
            x = calls[0].x
            self._check_contexts(calls)
        return x.reshape(*lead, *x.shape[1:])

    def outputs(self, x: Tensor) -> Any:
        if self.own_head is not None:
            return self.own_head(x)
        last = len(self.blocks()) - 1
        with plain_kernels(), intercepted(self.blocks(), lambda i, call: x if i == last else call.x, self.form):
            return self.run(self.shaped(x))

    def tensor(self, output: Any) -> Tensor | None:
        """The tensor that is meant by what the module returns, sequences first."""
        found = tensor_in(output)
        turned = found is not None and found.dim() > 1 and self.form.tokens_first
        return found.transpose(0, 1) if found is not None and turned else found

    def shaped(self, x: Tensor) -> Tensor:
        """An input whose first state has the shape of x: the example's rows again and again, cut or repeated to another length."""
        rows: Tensor = self._as_many(self.example, len(x))
        if x.shape[-2] == self.tokens:
            return rows
        for axis in range(1, rows.dim()):
            length = rows.shape[axis]
            for wanted in dict.fromkeys((x.shape[-2] + length - self.tokens, round(x.shape[-2] * length / self.tokens))):
                if wanted > 0:
                    cut: Tensor = rows.index_select(axis, torch.arange(wanted, device=rows.device) % length)
                    if self._first_tokens(cut) == x.shape[-2]:
                        return cut
        raise ConfigError(
            f"{type(self.model).__name__} reads its example as {self.tokens} tokens, and cutting or repeating that gives none with "
            f"{x.shape[-2]}: give states, or an example=, of that length"
        )

    def check(self, depth: Depth) -> None:
        """Raises ConfigError where the rebuilt states or output are not the module's own, on the example or on the example backwards:
        blocks may be given something made of the input, and a head may look at it.
        """
        for tokens in (self.example, self.example.flip(-1)):
            self._check_states(depth, tokens)
            self._check_output(depth, tokens)

    def _check_states(self, depth: Depth, tokens: Tensor) -> None:
        """Whatever `embed` and `head` are, each block's own state goes to what the block makes of it, and on to the next block."""
        blocks, per_block = self.blocks(), depth.per_block
        with torch.no_grad(), plain_kernels(), passing(blocks, self.form) as passed:
            self.run(tokens)
        for i, (block, (x, y)) in enumerate(zip(blocks, passed, strict=True)):
            if i and not torch.equal(x, passed[i - 1][1]):
                raise ConfigError(
                    f"blocks=: {type(self.model).__name__} changes the state between block {i - 1} and block {i}: only plain sequences of "
                    "blocks are known; make the change a part of a block"
                )
            rebuilt = x
            for k in range(i * per_block, (i + 1) * per_block):
                rebuilt = depth.sublayers[k].step(rebuilt, depth.lengths[k])
            miss = float((rebuilt - y).norm() / y.norm().clamp_min(torch.finfo(y.dtype).tiny))
            if not miss <= tolerance(y.dtype):
                raise ConfigError(
                    f"blocks=: block {i} ({type(block).__name__}) gives another state than the maps that were seen in it (off by "
                    f"{miss:.1g}), as where it limits large states, lets some tokens pass by, or is given something made of the input, "
                    "such as a mask of padding: only maps of the state alone are known"
                )

    def _check_output(self, depth: Depth, tokens: Tensor) -> None:
        with plain_kernels():
            whole = self.tensor(self.run(tokens))
        rebuilt = self.tensor(self.outputs(depth(self.embed(tokens))))
        if whole is None or rebuilt is None or self.own_embed is not None or self.own_head is not None:
            return  # what the user put in the module's place is the user's
        size = whole.norm().clamp_min(torch.finfo(whole.dtype).tiny)
        miss = float((rebuilt - whole).norm() / size) if rebuilt.shape == whole.shape else math.inf
        if not miss <= tolerance(whole.dtype):
            raise ConfigError(
                f"head=: what {type(self.model).__name__} returns is not made of its last block's state alone (off by {miss:.1g}), as "
                "where a head looks at its input again: give head=, a function of that state"
            )

    def _calls(self, tokens: Tensor) -> list[Call]:
        """How the module calls its blocks for these inputs."""
        blocks = self.blocks()
        with plain_kernels():
            return recorded_until(blocks, len(blocks) - 1, lambda: self.run(tokens), self.form)

    def _check_contexts(self, calls: Sequence[Call]) -> None:
        """Raises ConfigError where blocks are given something besides the state that an example of the same shape does not give them."""
        if not any(list(tensors_in(call.beside)) for call in calls):
            return
        for call, like in zip(calls, self._calls(self.shaped(calls[0].x)), strict=True):
            for name, value in call.beside.items():
                if not _equal(list(tensors_in(value)), list(tensors_in(like.beside.get(name)))):
                    raise ConfigError(
                        f"{type(self.model).__name__} gives its blocks another {name} for these inputs than for its example, as where a "
                        "mask of padding is made of the tokens: its maps are known for what the example gives them; give inputs that are "
                        "like it, such as without padding"
                    )

    def of(self, model: nn.Module) -> ModuleAdapter:
        """The same around a copy of the model."""
        other = copy.copy(self)
        other.model = model
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleAdapter:
        model = memo.get(id(self.model))
        return self if model is None else self.of(model)

    def _sequence(self, anatomy: Anatomy) -> tuple[str, StateForm]:
        with plain_kernels():
            return find_sequence(self.model, lambda: self.run(self.example), anatomy.blocks)

    def _vocabulary(self) -> int:
        """How many rows the table has that is read at the example's ids; of several that change with them, the largest."""
        seen: list[tuple[nn.Embedding, Tensor]] = []
        tables = [part for part in self.model.modules() if isinstance(part, nn.Embedding)]
        handles = [part.register_forward_pre_hook(lambda part, args: seen.append((part, args[0].clone()))) for part in tables]
        try:
            with torch.no_grad(), plain_kernels():
                self.run(self.example)
                first = list(seen)
                seen.clear()
                self.run(self.example.roll(1, -1))
        finally:
            for handle in handles:
                handle.remove()
        ids = self.example.sort(-1).values
        read = [part for part, given in first if given.shape == ids.shape and torch.equal(given.sort(-1).values.to(ids), ids)]
        pairs = zip(first, seen, strict=False)
        changed = [part for (part, one), (_, other) in pairs if one.shape == other.shape and not torch.equal(one, other)]
        return max((part.num_embeddings for part in [part for part in changed if part in read] or changed or read), default=0)

    def _turned(self, form: StateForm) -> StateForm:
        """The form with its order of axes, by where the first block mixes; and the example with sequences first, as it is seen."""
        block = self.blocks()[0]
        with plain_kernels():
            call = without_cache(recorded_until([block], 0, lambda: self.run(self.example), form)[0])
            first = bool(token_axis_is_first(Running(block, call, form), call.x))
            form = StateForm(form.part, tokens_first=first)
            if self.example.dim() > 1 and self._grown(form, 0) != (1, 0) and self._grown(form, 1) == (1, 0):
                self.example, self.tokens_first = self.example.transpose(0, 1), True
        return form

    def _grown(self, form: StateForm, axis: int) -> tuple[int, int] | None:
        """By how much sequences and tokens of the first state grow where the example grows by one along that axis."""
        more = torch.cat([self.example, self.example.narrow(axis, 0, 1)], axis)
        try:
            states = [recorded_until(self.blocks()[:1], 0, partial(self.run, x), form)[0].x for x in (self.example, more)]
        except FOREIGN_ERRORS:
            return None
        return states[1].shape[0] - states[0].shape[0], states[1].shape[1] - states[0].shape[1]

    def _like_the_weights(self, value: Any) -> Any:
        like = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        if like is None or not isinstance(value, Tensor):
            return value
        return value.to(like.device, like.dtype) if value.is_floating_point() else value.to(like.device)

    def _as_many(self, value: Any, count: int) -> Any:
        """A tensor's first axis repeated to that many, where it is that of sequences."""
        if isinstance(value, Tensor) and value.dim() and len(value) == len(self.example):
            return value[torch.arange(count, device=value.device) % len(value)]
        return value

    def _first_tokens(self, tokens: Tensor) -> int | None:
        try:
            with torch.no_grad(), plain_kernels():
                calls = recorded_until(self.blocks(), 0, lambda: self.run(tokens), self.form)
        except FOREIGN_ERRORS:
            return None
        return calls[0].x.shape[-2] if calls else None


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _fits(model: nn.Module, named: Mapping[str, Any]) -> bool:
    """Whether these can be keyword arguments of its forward."""
    try:
        inspect.signature(model.forward).bind(**named)
        return True
    except TypeError:
        return False


class SeenContexts:
    """How a module calls each block's attention, for states of any shape: seen when it reads an input of that length."""

    def __init__(self, adapter: ModuleAdapter, paths: tuple[str, ...]):
        self.adapter, self.paths = adapter, paths
        self._known: dict[tuple[Any, ...], list[Template]] = {}

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.adapter.model
        return model

    def of(self, block: int, x: Tensor) -> dict[str, Any]:
        """The call of that block's attention, for the state x (batch, tokens, width)."""
        # kernels differ in what masks they are given
        key = (x.shape, x.dtype, x.device, getattr(getattr(self.model, "config", None), IMPLEMENTATION, None))
        if key not in self._known:
            if len(self._known) == KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = self._seen(x)
        return {"call": self._known[key][block]}

    def forget(self) -> None:
        self._known.clear()

    def _seen(self, x: Tensor) -> list[Template]:
        parts = {
            str(i): part.get_submodule(path) for i, (part, path) in enumerate(zip(self.adapter.blocks(), self.paths, strict=True))
        }
        with torch.no_grad(), plain_kernels(), watched(parts) as acts:
            self.adapter.run(self.adapter.shaped(x))
        return [act.template.alone(act.x) for act in acts]

    def __deepcopy__(self, memo: dict[int, Any]) -> SeenContexts:
        model = memo.get(id(self.adapter.model))
        return self if model is None else SeenContexts(self.adapter.of(model), self.paths)
