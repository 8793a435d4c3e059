"""The operations of a forward pass as a graph: which reads the output of which.

A call of a linear map, of a norm or of a table is one operation.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import chain, islice
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ctrans.interop.attention_function import FUNCTION, taken_apart
from ctrans.interop.block_calls import tensors_in
from ctrans.interop.module_chain import is_linear
from ctrans.interop.operation_names import DECISIONS, NORM, PRODUCTS, VALUES_READ
from ctrans.interop.scripted import as_written
from ctrans.interop.tolerances import same_where_finite
from ctrans.interop.writes import (
    changes_its_input,
    copied_by,
    is_whole,
    places_in,
    put_into,
    taken_from,
)

CallSite = tuple[Any, ...]
"""Where code calls an operation: the code, the place in it, and how often it ran before; or the
path of a module, and how often it was called before.
"""
Function = Callable[..., Any]
"""A function of torch, or a module."""
Met = Callable[[CallSite, Function, Any, Any], Any]
"""From the call site, function, arguments and output of an operation to what it returns instead."""
BETWEEN = ("torch.overrides", "torch.nn.functional", "jaxtyping._decorator")
"""Modules whose code is between a call and its operation; jaxtyping's if it checks types in use."""


def name_of(function: Function) -> str:
    """The name of a function of torch, or what a module computes."""
    if isinstance(function, nn.Embedding):
        return "embedding"
    if isinstance(function, nn.Module):
        if is_linear(function):
            return "linear"
        return NORM
    name: str = function.__name__
    if name == "__get__":  # of a property, such as x.mT
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return name


@lru_cache(maxsize=1 << 16)
def _place_of(code: CodeType, instruction: int) -> int | tuple[int | None, ...]:
    """The place in the source of an instruction, or its number if there is none. Python may carry
    out a call at another instruction once it has learned what it calls.
    """
    positions = next(islice(code.co_positions(), instruction // 2, None), (None,))
    if None in positions:
        return instruction
    return positions


class Operations(TorchFunctionMode):
    """Inside, `met` gets each operation. A call of one of the `whole` modules is one. With `apart`,
    torch's function of attention is the operations that it consists of.
    """

    def __init__(self, met: Met, whole: Mapping[nn.Module, str], *, apart: bool = False):
        super().__init__()
        self.met = met
        self.apart = apart
        self.whole = whole
        self.seen = Counter[CallSite]()
        self._calling: list[nn.Module] = []
        self._hooks = ExitStack()

    def __enter__(self) -> Operations:
        for part in self.whole:
            begin = part.register_forward_pre_hook(self._begins, with_kwargs=True)
            end = part.register_forward_hook(self._ends, with_kwargs=True, always_call=True)
            self._hooks.callback(begin.remove)
            self._hooks.callback(end.remove)
        self._hooks.enter_context(as_written())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here
        self._hooks.close()

    def _begins(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        if _is_of_one_tensor(args, kwargs):
            self._calling.append(part)

    def _ends(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # torch calls it again if it has raised an error
        if not self._calling or not _is_of_one_tensor(args, kwargs):
            return output
        try:
            if len(self._calling) > 1 or output is None:
                return output
            return self.met(self._site(self.whole[part]), part, (args, kwargs), output)
        finally:  # what `met` computes is no operation of the model
            self._calling.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._calling:
            return func(*args, **(kwargs or {}))
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") in BETWEEN:
            frame = frame.f_back
        site = self._site(frame.f_code, _place_of(frame.f_code, frame.f_lasti))
        arguments = (args, kwargs or {})
        output = func(*args, **(kwargs or {}))
        if self.apart and func is FUNCTION:
            with self._again():
                parts = taken_apart(arguments)
            if parts is not None and same_where_finite(parts[0], output[0]):
                return self._put_together(site, *parts)
        return self.met(site, func, arguments, output)

    def _put_together(self, site: CallSite, y: Tensor, rows: Tensor | None) -> Any:
        """What torch's function of attention returns."""
        y = self.met((*site, 0), torch.clone, ((y,), {}), y.clone())
        if rows is not None:
            rows = self.met((*site, 1), torch.clone, ((rows,), {}), rows.clone())
        return y, rows

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Inside, `met` gets operations also while it is called for one."""
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _site(self, *line: Any) -> CallSite:
        self.seen[line] += 1
        return (*line, self.seen[line])


def _is_of_one_tensor(args: Any, kwargs: Any) -> bool:
    """Whether a module gets one tensor alone: a norm that may add a residual is known without."""
    return len(tensors_in((args, kwargs))) == 1


@dataclasses.dataclass(frozen=True)
class Made:
    """Stands for a tensor in the arguments of an operation: the number of the one that made it."""

    number: int


class Operation(NamedTuple):
    """An operation and the numbers of those that it reads; a tensor that none made has no call
    site.

    - `function`, `args`, `kwargs`: its call, with `Made` in place of tensors
    - `part`: which tensor of a call's several outputs it is; None for a call
    - `path`: the name of a tensor that none made, "" if the model has no name for it
    """

    site: CallSite | None
    name: str
    reads: list[int]
    output: Any
    function: Function | None = None
    args: Any = ()
    kwargs: Any = None
    part: int | None = None
    path: str = ""

    @property
    def shape(self) -> torch.Size | None:
        """The shape of its output if that is one tensor of numbers."""
        if isinstance(self.output, Tensor) and self.output.is_floating_point():
            return self.output.shape
        return None


def _selects_by_value(name: str, inputs: list[Tensor]) -> bool:
    """Whether the size of a function's output depends on the values of its inputs."""
    if name == "where":
        return len(inputs) == 1
    return name == "__getitem__" and any(x.dtype == torch.bool for x in inputs[1:])


def _layout_of(name: str, kwargs: Mapping[str, Any]) -> torch.memory_format | None:
    """The order in memory that a call of that name asks for; None if it asks for none."""
    default = torch.contiguous_format if name == "contiguous" else torch.preserve_format
    layout: torch.memory_format = kwargs.get("memory_format", default)
    if layout == torch.preserve_format:
        return None
    return layout


def written_by(function: Function, arguments: Any) -> Tensor | None:
    """The tensor into which a call writes, its `out` or its first argument, or None."""
    _, kwargs = arguments
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    if not changes_its_input(_name_of_call(function, kwargs)):
        return None
    return next(iter(tensors_in(arguments)), None)


def replaced(
    function: Function, arguments: Any, output: Any, new: Callable[[Tensor], Tensor]
) -> Any:
    """What a call returns with new(x) in place of the tensor x that it makes or writes into."""
    written = written_by(function, arguments)
    if written is None:
        return new(output)
    # the code may go on with the tensor that it wrote into, not with what is returned
    instead = new(written)
    if instead is not written:
        if not written._is_view():
            written.detach_()  # what it was made of is not what it is now
        written.copy_(instead)
    return output


def _name_of_call(function: Function, kwargs: Mapping[str, Any]) -> str:
    """The name of a function, with "_" if it writes into its input because it is asked to."""
    name = name_of(function)
    # a dropout in evaluation passes its input on
    if kwargs.get("inplace") is True and "dropout" not in name:
        name += "_"
    return name


class Graph:
    """The operations of one pass of a model, by number."""

    def __init__(self, model: nn.Module) -> None:
        self.operations: list[Operation] = []
        self.decisions: list[int] = []
        """The operations whose values became Python's numbers, as a branch of the code needs."""
        self.numbers: dict[CallSite, int] = {}
        """By call site."""
        self.orders: dict[tuple[int, int], list[int]] = {}
        """By two operations: those in order that make the second of the first."""
        self.sums: dict[int, Any] = {}
        """By number, the residual sum that it is, or None, once it was looked for."""
        self.layouts: dict[int, torch.memory_format] = {}
        """By number, the order in memory that the code asks for of an output that already has it.
        Another kernel may return the same numbers in another order.
        """
        self.hides_operations = False
        """Whether a transform of torch.func has hidden operations on numbers of states."""
        self._transforms = get_dynamic_layer_stack_depth()
        self._numbers: dict[int, int] = {}
        """By id of a tensor, the number of the operation that made it, or changed it last."""
        self._views: dict[int, list[Tensor]] = {}
        """By id of a tensor, its views."""
        self._weights: list[list[nn.Parameter] | None] = []
        """By operation, the parameters that alone make its output, such as a slice of one."""
        self._paths = {
            id(tensor): path
            for path, tensor in chain(
                model.named_parameters(remove_duplicate=False),
                model.named_buffers(remove_duplicate=False),
            )
        }

    def number(self, tensor: Tensor) -> int:
        """The number of the operation that made the tensor, or changed it last."""
        if id(tensor) not in self._numbers:
            path = self._paths.get(id(tensor), "")
            self._add(Operation(None, "", [], tensor, path=path), [tensor])
        return self._numbers[id(tensor)]

    def met(self, site: CallSite, function: Function, arguments: Any, output: Any) -> Any:
        """Adds an operation; for `Operations`. What runs inside of a transform of torch.func, such
        as torch.vmap, is left out: its tensors are others than those outside.
        """
        if get_dynamic_layer_stack_depth() > self._transforms:
            self.hides_operations |= any(x.is_floating_point() for x in tensors_in(arguments))
            return output
        name = _name_of_call(function, arguments[1])
        written = written_by(function, arguments)
        copied = copied_by(name, arguments[0])
        if copied is not None:
            name = "clone"
            function = torch.clone
            arguments = ((copied,), {})
        elif written is not None and arguments[1].get("out") is written:
            kwargs = {key: value for key, value in arguments[1].items() if key != "out"}
            arguments = (arguments[0], kwargs)
        elif name == "__getitem__" and is_whole(arguments[0][1]):
            name = "alias"
        inputs = tensors_in(arguments)
        if name in DECISIONS or _selects_by_value(name, inputs):
            self.decisions += [self.number(x) for x in inputs]
        results = tensors_in(output if written is None else written)
        if written is None:  # what it only passes on is no result
            results = [x for x in results if all(x is not input_ for input_ in inputs)]
            layout = _layout_of(name, arguments[1])
            if layout is not None and inputs and output is inputs[0]:
                self.layouts[self.number(output)] = layout
        if results:
            numbers = [self.number(x) for x in inputs]
            reads = numbers[: VALUES_READ.get(name)]
            if isinstance(function, nn.Module):
                reads += [self.number(weight) for weight in function.parameters()]
            args, kwargs = tree_map(self._as_made, arguments)
            changed = output if written is None else written
            call = Operation(site, name, reads, changed, function, args, kwargs)
            self._add(call, results)
            if written is not None:
                self._write_through(site, written)
        # several outputs: each is an operation that reads them all
        if not isinstance(output, Tensor):
            for i, x in enumerate(tensors_in(output)):
                self._add(Operation((*site, i), "", [self.number(x)], x, part=i), [x])
        return output

    def _write_through(self, site: CallSite, view: Tensor) -> None:
        """Adds the change of the tensor of which a changed one is a view."""
        base = view._base
        if base is None:
            self._write_to_others(site, view, view)
            return
        numbers = [self.number(base), self.number(view)]
        args = (*map(Made, numbers), places_in(base, view))
        call = Operation((*site, "base"), put_into.__name__, numbers, base, put_into, args, {})
        self._add(call, [base])
        self._write_to_others(site, base, view)

    def _write_to_others(self, site: CallSite, base: Tensor, view: Tensor) -> None:
        """Adds the change of the other views of a changed tensor."""
        others = [each for each in self._views.get(id(base), []) if each is not view]
        for i, other in enumerate(others):
            number = self.number(base)
            args = (Made(number), places_in(base, other), other.shape)
            name = taken_from.__name__
            call = Operation((*site, "view", i), name, [number], other, taken_from, args, {})
            self._add(call, [other])

    def _as_made(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Made(self.number(value))
        return value

    def _add(self, operation: Operation, results: list[Tensor]) -> None:
        self._weights.append(self._weights_of(operation))
        for tensor in results:
            if tensor._base is not None and id(tensor) not in self._numbers:
                self._views.setdefault(id(tensor._base), []).append(tensor)
            self._numbers[id(tensor)] = len(self.operations)
        if operation.site is not None:
            self.numbers[operation.site] = len(self.operations)
        self.operations.append(operation)

    def _weights_of(self, operation: Operation) -> list[nn.Parameter] | None:
        """The parameters that alone make its output; None if something else takes part."""
        if not operation.site:
            if isinstance(operation.output, nn.Parameter):
                return [operation.output]
            return None
        weights: dict[nn.Parameter, None] = {}
        for number in operation.reads:
            parameters = self._weights[number]
            if parameters is None:
                return None
            weights.update(dict.fromkeys(parameters))
        return list(weights)

    def is_of_weights(self, n: int) -> bool:
        """Whether parameters alone make the output of operation n."""
        return bool(self._weights[n])

    def as_state(self, n: int) -> None:
        """What operation n makes, and what is made of it, counts as made of no weights alone, such
        as learned queries that are the first state.
        """
        for m in self.after(n):
            self._weights[m] = None

    def stacked_vectors(self) -> list[str]:
        """The paths of the parameters of several axes of which only vectors are read, such as the
        offsets of all blocks in one.
        """
        readers: list[list[int]] = [[] for _ in self.operations]
        for n, operation in enumerate(self.operations):
            for number in set(operation.reads):
                readers[number].append(n)

        def is_read_by_vectors(n: int) -> bool:
            return bool(readers[n]) and all(map(is_vector_or_stack, readers[n]))

        def is_vector_or_stack(n: int) -> bool:
            shape = self.operations[n].shape
            is_vector = shape is not None and sum(size > 1 for size in shape) <= 1
            return self.is_of_weights(n) and (is_vector or is_read_by_vectors(n))

        return [
            operation.path
            for n, operation in enumerate(self.operations)
            if isinstance(operation.output, nn.Parameter)
            and operation.site is None
            and operation.output.dim() > 1
            and is_read_by_vectors(n)
        ]

    def weights(self, first: int, last: int) -> list[nn.Parameter]:
        """The parameters that the operations after `first`, up to `last`, read, or slices of
        them.
        """
        return self.read_by(range(first + 1, last + 1), first)

    def read_by(self, numbers: Iterable[int], first: int) -> list[nn.Parameter]:
        """The parameters that these operations read, or slices of them, other than through
        `first`.
        """
        weights: dict[nn.Parameter, None] = {}
        for n in numbers:
            for number in self.operations[n].reads:
                if number != first:
                    weights.update(dict.fromkeys(self._weights[number] or ()))
        return list(weights)

    def path_around(self, weights: Sequence[Tensor]) -> str:
        """The path of the smallest module that has all these weights of the model; "" for the model
        itself.
        """
        paths = [self._paths.get(id(weight), "").split(".")[:-1] for weight in weights]
        if not paths:
            return ""
        common = []
        for steps in zip(*paths, strict=False):
            if len(set(steps)) > 1 or steps[0] == "parametrizations":
                break
            common.append(steps[0])
        return ".".join(common)

    def after(self, source: int, without: int | None = None) -> set[int]:
        """The source and the operations that see it, other than through `without`."""
        seen = {source}
        for n in range(source + 1, len(self.operations)):
            if n != without and not seen.isdisjoint(self.operations[n].reads):
                seen.add(n)
        return seen

    def before(self, sink: int) -> set[int]:
        """The sink and the operations that it sees."""
        seen = {sink}
        for n in range(sink, 0, -1):
            if n in seen:
                seen.update(self.operations[n].reads)
        return seen

    def bottlenecks(self, source: int, sink: int) -> tuple[list[int], dict[int, list[int]]]:
        """The operations through which alone the sink sees the source, and who reads each operation
        between them.
        """
        after = self.after(source)
        before = self.before(sink)
        readers: dict[int, list[int]] = {n: [] for n in sorted(after & before)}
        for n in readers:
            for number in {*self.operations[n].reads} & readers.keys():
                readers[number].append(n)
        found = []
        furthest = source
        for n, readers_of_n in readers.items():
            if furthest <= n:
                found.append(n)
            furthest = max(furthest, *readers_of_n, n)
        return found, readers

    def products_of(self, x: int, n: int) -> set[int]:
        """The operations between x and n that see a product of matrices of what x makes."""
        seen = {x}
        multiplied = set[int]()
        for m in range(x + 1, n):
            operation = self.operations[m]
            if seen.isdisjoint(operation.reads):
                continue
            seen.add(m)
            is_product = any(word in operation.name for word in PRODUCTS)
            if is_product or not multiplied.isdisjoint(operation.reads):
                multiplied.add(m)
        return multiplied
