"""Products of a state and a matrix of weights among the operations of a forward pass, whatever
function computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ctrans.interop.operations import Graph, Made, Operation

AS_IT_IS = "as it is"
TRANSPOSED = "transposed"
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


@dataclass(frozen=True)
class Product:
    """A product W x + b of a state x and weights.

    - `state`: the number of the operation that makes the state
    - `weight`, `bias`: those of the weights
    - `form`: what makes the weight a matrix (out, in): AS_IT_IS, TRANSPOSED, or the order of its
      axes, such as (1, 2, 0)
    - `axes`: how many last axes of the state are summed over
    - `channels`: the axis that is summed over in place of the last one, and that of the result
    """

    state: int
    weight: int
    bias: int | None
    form: str | tuple[int, ...]
    axes: int = 1
    channels: int = -1

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight with its axes in the order (out, in)."""
        if self.form == AS_IT_IS:
            return weight
        if self.form == TRANSPOSED:
            return weight.mT
        assert not isinstance(self.form, str)
        return weight.permute(*self.form)


def product_at(graph: Graph, n: int) -> Product | None:
    """The product that operation n is, alone or with an offset added; None if it is none."""
    operation = graph.operations[n]
    product = None
    if operation.name in ("add", "add_"):
        return _with_offset(graph, operation)
    if operation.name == "linear" and callable(operation.function):
        product = _linear(operation)
    elif operation.name in CONVOLUTIONS:
        product = _pointwise(graph, operation)
    elif operation.kwargs:
        return None
    elif operation.name in ("matmul", "mm", "__matmul__"):
        state, weight = _numbers(operation)
        if len(graph.operations[weight].shape or ()) == 2:
            product = Product(state, weight, None, TRANSPOSED)
    elif operation.name == "addmm":
        bias, state, weight = _numbers(operation)
        product = Product(state, weight, bias, TRANSPOSED)
    elif operation.name == "einsum":
        return _einsum(graph, operation)
    if product is None or not _is_of_weights(graph, product):
        return None
    return product


def _numbers(operation: Operation) -> list[int]:
    return [each.number for each in operation.args if isinstance(each, Made)]


def _is_of_weights(graph: Graph, product: Product) -> bool:
    """Whether its weight and offset are made of parameters, and its state is not."""
    if graph.is_of_weights(product.state) or not graph.is_of_weights(product.weight):
        return False
    return product.bias is None or graph.is_of_weights(product.bias)


def _with_offset(graph: Graph, operation: Operation) -> Product | None:
    """A product and an offset for each channel."""
    numbers = _numbers(operation)
    if len(numbers) != 2 or operation.kwargs:
        return None
    for inner, offset in (numbers, numbers[::-1]):
        product = product_at(graph, inner)
        if product is None or product.bias is not None or not graph.is_of_weights(offset):
            continue
        channels = graph.operations[offset].shape
        shape = graph.operations[inner].shape
        if channels is not None and shape is not None and channels == shape[-1:]:
            return replace(product, bias=offset)
    return None


def _linear(operation: Operation) -> Product | None:
    named = dict(zip(("input", "weight", "bias"), operation.args, strict=False))
    named |= operation.kwargs or {}
    state, weight, bias = (named.get(name) for name in ("input", "weight", "bias"))
    if not isinstance(state, Made) or not isinstance(weight, Made):
        return None  # a call of a module
    if isinstance(bias, Made):
        return Product(state.number, weight.number, bias.number, AS_IT_IS)
    return Product(state.number, weight.number, None, AS_IT_IS)


def _pointwise(graph: Graph, operation: Operation) -> Product | None:
    """A convolution of each token alone, which is a linear map of its channels."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    named = dict(zip(names, operation.args, strict=False)) | (operation.kwargs or {})
    state, weight, bias = (named.get(name) for name in names[:3])
    if not isinstance(state, Made) or not isinstance(weight, Made):
        return None
    shape = graph.operations[weight.number].shape
    given = graph.operations[state.number].shape
    if shape is None or given is None or len(given) != len(shape) or shape[2:].numel() != 1:
        return None
    is_plain = (
        _all_are(named.get("stride", 1), 1)
        and (named.get("padding", 0) in ("same", "valid") or _all_are(named.get("padding", 0), 0))
        and named.get("groups", 1) == 1
    )
    if not is_plain:
        return None
    offset = bias.number if isinstance(bias, Made) else None
    return Product(state.number, weight.number, offset, AS_IT_IS, channels=1)


def _all_are(value: object, number: int) -> bool:
    return value == number or (isinstance(value, (list, tuple)) and set(value) == {number})


def _einsum(graph: Graph, operation: Operation) -> Product | None:
    """A contraction over the last axes of a state, whose result has new axes last."""
    equation, *operands = operation.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    terms = given.split(",")
    for (x, w), (state, weight) in ((terms, operands), (terms[::-1], operands[::-1])):
        if not isinstance(state, Made) or not isinstance(weight, Made):
            return None
        summed = "".join(axis for axis in x if axis not in result)
        kept = x.removesuffix(summed)
        free = result.removeprefix(kept)
        if not summed or kept + summed != x or kept + free != result:
            continue
        if sorted(w) != sorted(free + summed) or set(free) & set(x):
            continue
        order = tuple(w.index(axis) for axis in free + summed)
        product = Product(state.number, weight.number, None, order, len(summed))
        if _is_of_weights(graph, product):
            return product
    return None
