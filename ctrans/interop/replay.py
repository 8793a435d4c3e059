"""A part of a forward pass as a function: the operations from one tensor to another are run again,
for other values of the first.

Its linear maps become modules, whatever the model calls them as, so that hooks see them. All
parameters are the model's own.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ctrans.interop.block_calls import tensors_in
from ctrans.interop.module_chain import is_linear
from ctrans.interop.operation_names import CONVERSIONS, MOVES, PRODUCTS
from ctrans.interop.operations import CallSite, Graph, Made, Operation
from ctrans.interop.products import AS_IT_IS, TRANSPOSED, Product, product_at
from ctrans.interop.state_axes import StateAxes
from ctrans.interop.writes import changes_its_input
from solvers import ConfigError

Computed = dict[int, Any]
"""What operations returned, by their numbers."""


class NotReplayedError(ConfigError):
    """Why a part of a forward pass cannot be run alone."""


class Transposed(nn.Module):
    """W x + b with a weight (in, out), as `TransposedLinear`."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.nx, self.nf = weight.shape
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        if self.bias is not None:
            y = y + self.bias
        return y


class ComputedLinear(nn.Linear):
    """W x + b with a weight that operations make of parameters, such as a slice of a larger one."""

    def __init__(self, product: Product, weight: Replayed, bias: Replayed | None, inputs: int):
        nn.Module.__init__(self)
        self.product = product
        self.of_weight = weight
        self.of_bias = bias
        self.in_features = inputs
        self.out_features = len(self.weight)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # no parameter of its own
        matrix = self.product.matrix(self.of_weight.of_weights())
        return matrix.reshape(-1, self.in_features)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]  # no parameter of its own
        if self.of_bias is None:
            return None
        return self.of_bias.of_weights()


class Replayed(nn.Module):
    """The tensor `last` of a pass as a function of the tensor `first`; of parameters alone if
    `first` is None.

    - `channels`: the axis of both that counts channels, which is the last axis of the function's
      argument and result
    - `offset`: what makes an offset of parameters that is added to `last`, a product of matrices

    What `last` reads of the model's input beside `first`, such as an encoder's output, keeps its
    value. Raises NotReplayedError if the model's code decides by values what it does.
    """

    label = "operations"
    rows: tuple[int, int] | None = None
    """The numbers of sequences and of tokens, where `first` has states."""
    tokens_first = False
    adapter: Any = None
    """The adapter of the model, for maps of states."""
    axes: StateAxes | None = None
    own: torch.Size = torch.Size()
    """The axes of the model's own states, and the shape of the one that `first` has."""

    def __init__(
        self,
        graph: Graph,
        first: int | None,
        last: int,
        channels: int = -1,
        offset: int | None = None,
    ):
        super().__init__()
        self.graph = graph
        self.first = first
        self.last = last
        self.channels = channels
        self.modules_by_site: dict[CallSite, str] = {}
        self.names: dict[str, str] = {}
        """The names of its parameters, by their paths in the model."""
        order = _between(graph, first, last)
        products: dict[int, Product] = {}
        if first is not None:
            products = self._products(order)
        if offset is not None:
            if last not in products or products[last].bias is not None:
                raise NotReplayedError("it adds an offset to what is no product of matrices")
            products[last] = dataclasses.replace(products[last], bias=offset)
        done_by_modules = {m for n in products for m in self._parts_of(n, products[n], order)}
        self.done_by_modules = {graph.operations[n].site for n in done_by_modules}
        self.order = self._without_done(graph, order)
        self._add_parts(products)

    def _without_done(self, graph: Graph, order: Sequence[int]) -> list[int]:
        """Those of these operations in place of which no linear map acts."""
        return [n for n in order if graph.operations[n].site not in self.done_by_modules]

    def order_in(self, graph: Graph, first: int, last: int) -> list[int]:
        """The operations from `first` to `last` in another pass, in order. They may be others, as
        where a mask hides something or a loop runs over more tokens.
        """
        if (first, last) not in graph.orders:
            graph.orders[first, last] = _between(graph, first, last)
        return self._without_done(graph, graph.orders[first, last])

    def _products(self, order: Sequence[int]) -> dict[int, Product]:
        """The products with matrices of weights, each with its offset if it has one."""
        products: dict[int, Product] = {}
        for n in order:
            product = product_at(self.graph, n)
            if product is None:
                continue
            without_offset = [m for m in products if m in self.graph.operations[n].reads]
            if product.bias is not None and without_offset:
                (inner,) = without_offset
                if [m for m in order if inner in self.graph.operations[m].reads] != [n]:
                    continue  # something else reads the product without its offset
                del products[inner]
            products[n] = product
        return products

    def _parts_of(self, n: int, product: Product, order: Sequence[int]) -> list[int]:
        """The operations in place of which a linear map acts: those that make its weights, and the
        product before its offset.
        """
        graph = self.graph
        makes_weights = graph.before(product.weight)
        if product.bias is not None:
            makes_weights |= graph.before(product.bias)
        parts = [m for m in order if m in makes_weights and graph.is_of_weights(m)]
        if graph.operations[n].name in ("add", "add_"):
            parts += [m for m in graph.operations[n].reads if not graph.is_of_weights(m)]
        return parts

    def _add_parts(self, products: dict[int, Product]) -> None:
        """Adds the modules of the operations, and the parameters that the others read."""
        read = {self.last}
        for n in self.order:
            operation = self.graph.operations[n]
            if n in products:
                self._add_module(operation, "linear", self._linear(products[n]))
            elif isinstance(operation.function, nn.Module):
                self._add_module(operation, _last_name(operation.site), operation.function)
            else:
                read.update(operation.reads)
        for number in sorted(read):
            operation = self.graph.operations[number]
            if isinstance(operation.output, nn.Parameter) and operation.site is None:
                self._add_weight(operation)

    def _add_module(self, operation: Operation, name: str, module: nn.Module) -> None:
        assert operation.site is not None
        known = {id(part): path for path, part in self.named_children()}
        path = known.get(id(module), name)
        if id(module) not in known and (hasattr(self, path) or path.isdigit()):
            path = f"{name}_{len(self.modules_by_site)}"
        self.add_module(path, module)
        self.modules_by_site[operation.site] = path

    def _add_weight(self, operation: Operation) -> None:
        path = operation.path or f"weight{len(self.names)}"
        name = path.rpartition(".")[2]
        if name.isdigit() or hasattr(self, name):
            name = path.replace(".", "_")
        self.register_parameter(name, operation.output)
        self.names[path] = name

    def _linear(self, product: Product) -> nn.Module:
        """The linear map of a product."""
        weight: Any = self.graph.operations[product.weight].output
        bias: Any = None
        if product.bias is not None:
            bias = self.graph.operations[product.bias].output
        is_parameter = isinstance(weight, nn.Parameter) and weight.dim() == 2
        if is_parameter and (bias is None or isinstance(bias, nn.Parameter)):
            if product.form in (AS_IT_IS, (0, 1)):
                linear: Any = nn.Linear(1, 1, bias=False, device="meta")
                linear.weight = weight
                linear.bias = bias
                linear.out_features, linear.in_features = weight.shape
                module: nn.Module = linear
                return module
            if product.form in (TRANSPOSED, (1, 0)):
                return Transposed(weight, bias)
        state: Tensor = self.graph.operations[product.state].output
        inputs = math.prod(state.shape[-product.axes :])
        if product.channels != -1:
            inputs = state.shape[product.channels]
        of_bias = None
        if product.bias is not None:
            of_bias = Replayed(self.graph, None, product.bias)
        return ComputedLinear(product, Replayed(self.graph, None, product.weight), of_bias, inputs)

    @property
    def ending(self) -> str:
        """What it has in place of one linear map at its end, in words."""
        operations = [self.graph.operations[n] for n in self.order]
        places = [
            i for i, each in enumerate(operations) if any(word in each.name for word in PRODUCTS)
        ]
        if not places:
            return "has no product of matrices"
        last = operations[places[-1]]
        behind = [each.name for each in operations[places[-1] + 1 :] if each.part is None]
        unchanged = (*MOVES, *CONVERSIONS, "clone")
        changes = [name for name in dict.fromkeys(behind) if name not in unchanged]
        if changes:
            return f"does not end in a linear map: {', '.join(changes)} follows its last one"
        if self.axes is not None and self.axes.copies > 1:
            return (
                f"reads each sequence of its states as {self.axes.copies}, and linear maps are not"
                " read there"
            )
        if set(behind) & set(CONVERSIONS):
            return "changes the dtype behind its last linear map"
        if last.site in self.modules_by_site and behind:
            return "puts tokens in another order behind its last linear map, as windows do"
        if last.site in self.modules_by_site:
            return "does not end in one linear map"
        tensors = len(last.reads)
        return f"ends in {last.name} of {tensors} tensors, which is not read as a linear map"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `last` in the pass."""
        dtype: torch.dtype = self.graph.operations[self.last].output.dtype
        return dtype

    def of_weights(self) -> Tensor:
        """The tensor `last`, which operations make of parameters alone."""
        return self._run(self.graph, self.order, {}, self.last)

    def forward(self, x: Tensor) -> Tensor:
        assert self.first is not None
        axes = self.graph.operations[self.first].output.dim()
        rows = x
        if self.channels != -1 and x.dim() < axes:  # a weight of each channel has as many axes
            rows = x.reshape(*[1] * (axes - x.dim()), *x.shape)
        own = rows.movedim(-1, self.channels)
        y = self._run(self.graph, self.order, {self.first: own}, self.last)
        return y.movedim(self.channels, -1).reshape(*x.shape[:-1], -1)

    def _run(self, graph: Graph, order: Sequence[int], values: Computed, last: int) -> Tensor:
        """The tensor `last` of the operations of a graph, given some of their values."""
        for n in values:
            values[n] = _laid_out(graph, n, values[n])
        for n in order:
            if n not in values:
                values[n] = _laid_out(graph, n, self._value(graph, n, values))
        result: Tensor = self._read(graph, last, values)
        return result

    def _read(self, graph: Graph, n: int, values: Computed) -> Any:
        """The value that an operation reads."""
        if n not in values:
            operation = graph.operations[n]
            if operation.site is None or graph.is_of_weights(n):
                values[n] = _laid_out(graph, n, self._value(graph, n, values))
            else:  # another input, or what is made of it
                values[n] = operation.output
        return values[n]

    def _value(self, graph: Graph, n: int, values: Computed) -> Any:
        """What the operation returns."""
        operation = graph.operations[n]
        if operation.site is None:
            if operation.path in self.names:
                return self.get_parameter(self.names[operation.path])
            return operation.output
        if operation.part is not None:
            parts = tensors_in(values[operation.reads[0]])
            if operation.part >= len(parts):
                raise NotReplayedError("it uses the rows that torch's attention returns")
            return parts[operation.part]

        def filled(value: Any) -> Any:
            if isinstance(value, Made):
                return self._read(graph, value.number, values)
            return value

        if operation.site in self.modules_by_site:
            module = self.get_submodule(self.modules_by_site[operation.site])
            product = product_at(graph, n)
            if product is not None:
                x = filled(Made(product.state)).movedim(product.channels, -1)
                y = self._by_tokens(module, x.flatten(-product.axes))
                if product.channels != -1:
                    return y.movedim(-1, product.channels).contiguous()
                return y.reshape(operation.output.shape)
            args, kwargs = tree_map(filled, (operation.args, operation.kwargs))
            if is_linear(module) and not kwargs and isinstance(operation.output, Tensor):
                return self._by_tokens(module, *args)
            return module(*args, **kwargs)
        args, kwargs = tree_map(filled, (operation.args, operation.kwargs))
        function: Any = operation.function
        if changes_its_input(operation.name):
            target = args[0].clone()
            result = function(target, *args[1:], **kwargs)
            if result is None:
                return target
            return result
        if operation.name == "view" and _is_shape(args[1:]) and not kwargs:
            function = Tensor.reshape
        return function(*args, **kwargs)

    def _by_tokens(self, linear: nn.Module, x: Tensor) -> Tensor:
        """The linear map of tokens x in any order of their axes. It gets (batch, tokens, width), as
        hooks expect.
        """
        y: Tensor
        if self.rows is None or x.shape[:-1].numel() != math.prod(self.rows):
            y = linear(x)
        elif x.dim() > 3:
            y = self._by_tokens_of_images(linear, x)
        elif x.dim() == 2:
            y = linear(x.reshape(*self.rows, -1)).flatten(0, 1)
        elif self._has_tokens_first(x):
            y = linear(x.transpose(0, 1)).transpose(0, 1).contiguous()
        else:
            y = linear(x)
        return y

    def _by_tokens_of_images(self, linear: nn.Module, x: Tensor) -> Tensor:
        """The linear map of states with several axes of tokens, channels last."""
        y: Tensor
        if self.axes is None or self.rows is None or x.shape[:-1] != self.axes.tokens_of(self.own):
            y = linear(x)
            return y
        batch = self.axes.batch_among_tokens
        turned = x.movedim(batch, 0)
        y = linear(turned.reshape(*self.rows, -1))
        return y.reshape(*turned.shape[:-1], -1).movedim(0, batch)

    def _has_tokens_first(self, x: Tensor) -> bool:
        """Whether states (tokens, batch, width) are what a linear map gets."""
        sequences, tokens = x.shape[:2]
        if self.rows is None or sequences == tokens:
            return self.tokens_first
        return self.rows == (tokens, sequences)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replayed:
        """A copy with weights of its own, of the same operations."""
        memo[id(self.graph)] = self.graph
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


def _last_name(site: CallSite | None) -> str:
    """The last name in the path of the module that is called there, with its number in a list."""
    assert site is not None, "a call has one"
    names = str(site[0]).split(".")
    if names[-1].isdigit():
        return "_".join(names[-2:])
    return names[-1]


def _between(graph: Graph, first: int | None, last: int) -> list[int]:
    """The operations that `last` needs, given `first`, in order."""
    of_input = graph.after(0)
    of_first = set[int]()
    if first is not None:
        of_first = graph.after(first)
    if any(n in of_first and n < last for n in graph.decisions):
        raise NotReplayedError("its code decides by the values of the state what it does")
    needed = {last}
    for n in range(last, -1, -1):
        is_given = n == first or (n in of_input and n not in of_first)
        if n in needed and not is_given:
            needed.update(graph.operations[n].reads)
    return [
        n
        for n in sorted(needed)
        if n != first
        and graph.operations[n].site is not None
        and (n in of_first or n not in of_input)
    ]


def _laid_out(graph: Graph, n: int, value: Any) -> Any:
    """The value of operation n in the order in memory that the code asks for."""
    if n not in graph.layouts or value.dim() != graph.operations[n].output.dim():
        return value
    return value.contiguous(memory_format=graph.layouts[n])


def _is_shape(args: Sequence[Any]) -> bool:
    """Whether a view with these arguments gives its input another shape, rather than a dtype."""
    return not any(isinstance(each, torch.dtype) for each in args)
