"""Example inputs of a model, by the name of its main argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.interop.operations import Graph
from solvers import ConfigError

Example = Tensor | Mapping[str, Any]
"""A batch of inputs, or the keyword arguments of a forward pass with the batch first."""


def by_name(model: nn.Module, example: Example | Sequence[Any] | None) -> Example | None:
    """The example; of a list or tuple, what a forward pass gets in this order, by name.

    Raises ConfigError for more values than forward has arguments.
    """
    if example is None or isinstance(example, (Tensor, Mapping)):
        return example
    if len(example) == 1:
        only: Example = example[0]
        return only
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [each.name for each in parameters if each.kind in kinds]
    if not 0 < len(example) <= len(names):
        raise ConfigError(
            f"example= has {len(example)} values, and forward of {type(model).__name__} takes"
            f" {', '.join(names) or 'none by position'}: give a value for each, or a dict"
        )
    return dict(zip(names, example, strict=False))


def fits(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether these can be keyword arguments of its forward."""
    try:
        inspect.signature(model.forward).bind(**arguments)
    except TypeError:
        return False
    return True


def sequence_axes(
    named: Mapping[str, Any], count: int, runs: Callable[[Mapping[str, int]], bool]
) -> Mapping[str, int]:
    """The axis that counts sequences of each argument behind the main one whose first axis does
    not, such as a memory (layers, tokens, sequences, width).

    There are `count` sequences. `runs` says whether a model runs on another number of them with
    such axes. No argument has one if it runs without.
    """
    candidates: dict[str, list[int]] = {}
    for name, value in list(named.items())[1:]:
        if isinstance(value, Tensor) and value.dim() > 1 and len(value) != count:
            axes = [axis for axis in range(1, value.dim()) if value.shape[axis] == count]
            if axes:
                candidates[name] = axes
    if not candidates or runs({}):
        return {}
    # an axis may have that length by chance: 0 leaves the argument as it is
    for choice in product(*([*axes, 0] for axes in candidates.values())):
        axes_by_name = dict(zip(candidates, choice, strict=True))
        if runs(axes_by_name):
            return axes_by_name
    return {}


def main_input(model: nn.Module) -> str:
    """The name of the argument for the tokens or the image: `main_input_name`, or the first
    argument of forward.
    """
    parameters = inspect.signature(model.forward).parameters
    first = next(iter(parameters), "")
    return getattr(model, "main_input_name", first)


def example_of(model: nn.Module) -> dict[str, Any]:
    """A small input, as keyword arguments. Raises ConfigError for a model with another kind of
    input.
    """
    name = main_input(model)
    if name not in EXAMPLES:
        raise ConfigError(
            f"{type(model).__name__} takes {name!r} first, which is not one of"
            f" {', '.join(sorted(EXAMPLES))}: give example=dict(...), the keyword arguments of one"
            " forward pass"
        )
    # one whose weights are all read on demand has buffers at most
    weight = next(chain(model.parameters(), model.buffers()), torch.empty(0))
    example = EXAMPLES[name](model)
    if example.is_floating_point():
        return {name: example.to(weight.device, weight.dtype)}
    return {name: example.to(weight.device)}


def _images(model: nn.Module) -> Tensor:
    """Blank images of the size in the model's config."""
    config: Any = model.config
    size = config.image_size
    if isinstance(size, int):
        height = size
        width = size
    else:
        height, width = size
    return torch.zeros(1, config.num_channels, height, width)


def _sounds(model: nn.Module) -> Tensor:
    """Silent spectrograms (batch, frequencies, frames) of the size in the model's config; two
    frames make a state.
    """
    config: Any = model.config
    return torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)


def _tokens(model: nn.Module) -> Tensor:
    """One sequence of four token ids, not 0, which is often padding."""
    count: int = 5
    if hasattr(model, "get_input_embeddings"):
        embedding = model.get_input_embeddings()  # type: ignore[operator]  # a method, no module
        count = getattr(embedding, "num_embeddings", 5)
    return (torch.arange(1, 5) % count)[None]


def reads_tokens(model: nn.Module) -> bool:
    """Whether its main input is token ids."""
    return main_input(model) in ("input_ids", "idx")


EXAMPLES: Mapping[str, Callable[..., Tensor]] = {
    "input_ids": _tokens,
    "idx": _tokens,
    "pixel_values": _images,
    "input_features": _sounds,
}
"""Functions that make an input of one sequence, by the name of the model's main argument."""


@contextmanager
def ids_checked(model: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Inside, an embedding of the model raises ConfigError for ids that it has no row for: torch
    names neither, and on a GPU its error ends all computations.
    """
    if inputs.is_floating_point() or inputs.numel() == 0:
        yield
        return
    lowest = int(inputs.min())
    highest = int(inputs.max())

    def check(table: nn.Embedding, path: str, ids: Any) -> None:
        if not isinstance(ids, Tensor) or ids.numel() == 0 or ids.is_meta:
            return
        rows = table.num_embeddings
        lowest_id = int(ids.min())
        highest_id = int(ids.max())
        if lowest_id >= 0 and highest_id < rows:
            return
        if ids.shape == inputs.shape and not 0 <= lowest <= highest < rows:
            raise ConfigError(
                f"token ids run from {lowest} to {highest}, but the vocabulary of"
                f" {type(model).__name__} is 0 to {rows - 1} (its {path}): give ids in that range"
            )
        raise ConfigError(
            f"{path} of {type(model).__name__} has {rows} rows and gets ids from {lowest_id} to"
            f" {highest_id} for inputs {tuple(inputs.shape)}: give shorter sequences if it embeds"
            " positions, or other ids"
        )

    def hook(path: str) -> Callable[[nn.Embedding, tuple[Any, ...]], None]:
        return lambda table, args: check(table, path, args[0] if args else None)

    handles = [
        part.register_forward_pre_hook(hook(path))
        for path, part in model.named_modules()
        if isinstance(part, nn.Embedding) and _indexes_by_ids(part)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _indexes_by_ids(table: nn.Embedding) -> bool:
    """Whether its forward takes ids alone. With more arguments it may count positions, and take
    ids for their shape.
    """
    _itself, *arguments = inspect.signature(type(table).forward).parameters
    return len(arguments) == 1


def stand_in(model: Any, x: Tensor) -> dict[str, Any]:
    """Keyword arguments of a forward pass whose blocks get states of the shape of x. The values do
    not matter.
    """
    name = main_input(model)
    if not reads_tokens(model):
        one = EXAMPLES[name](model).to(x)
        return {name: one.expand(len(x), *one.shape[1:])}
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return {name: torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)}
    # a map between the table and the blocks may change the width
    width = getattr(model.get_input_embeddings(), "embedding_dim", x.shape[-1])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(*x.shape[:2], width, generator=generator).to(x)
    return {"inputs_embeds": rows, "use_cache": False}


def rows_chosen_by(ids: Tensor, graph: Graph) -> int:
    """The number of rows of the table from which these ids choose in a pass; of the largest, if
    they choose from several, and 0 if they choose from none.
    """
    sizes = [0]
    for operation in graph.operations:
        if operation.name not in ("embedding", "__getitem__"):
            continue
        read = [graph.operations[n].output for n in operation.reads]
        tables = [each for each in read if isinstance(each, nn.Parameter) and each.dim() == 2]
        if any(isinstance(each, Tensor) and each.equal(ids) for each in read):
            sizes += map(len, tables)
    return max(sizes)
