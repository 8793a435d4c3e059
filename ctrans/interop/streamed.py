"""A library's model as a skeleton, its matrices drawn or read from files when they are used: models
larger than memory.

A piece is the weights of one sublayer's attention or FFN, or of any other module that holds a
matrix (embeddings, head).
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from ctrans.given_files import check_file
from ctrans.interop.anatomy import Anatomy, fields
from ctrans.interop.find_blocks import find_blocks
from ctrans.weights.on_demand import KnownPieces, Piece, Shelf, put_on_demand
from solvers import ConfigError

Modules = Mapping[str, nn.Module]
"""Modules by their paths in a model."""
WeightSource = Callable[[Modules], Callable[[], dict[str, Tensor]]]
"""From the modules of a piece, without their matrices, to what makes the piece's weights by their
names in the model.
"""


def put_model_on_demand(model: nn.Module, anatomy: Anatomy, source: WeightSource) -> None:
    """The skeleton's matrices, made by the source when they are used; one piece is there at a time."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_meta)
    shelf, known = Shelf(dtype), KnownPieces()
    for modules in list(_pieces(model, anatomy)):
        piece = Piece(next(iter(modules)), source(modules))
        for path, module in modules.items():
            put_on_demand(module, piece, shelf, prefix=f"{path}.", known=known)


def put_in_place(model: nn.Module, anatomy: Anatomy, source: WeightSource) -> None:
    """The skeleton's matrices, all of them, to stay: the ordinary model."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for modules in list(_pieces(model, anatomy)):
        weights = source(modules)()
        for path, module in modules.items():
            for inner, part in module.named_modules(prefix=path):
                for name, parameter in list(part.named_parameters(recurse=False)):
                    if parameter.is_meta and parameter not in made:
                        made[parameter] = nn.Parameter(weights[f"{inner}.{name}"].to(parameter.dtype), parameter.requires_grad)
                    if parameter.is_meta:
                        setattr(part, name, made[parameter])


def _pieces(model: nn.Module, anatomy: Anatomy) -> Iterator[dict[str, nn.Module]]:
    paths = {module: path for path, module in model.named_modules()}
    inside: set[nn.Module] = set()
    for block in find_blocks(model, anatomy):
        for chain in fields(block, anatomy):
            inside |= {part for stage in chain.stages for part in stage.modules()}
            yield {paths[stage]: stage for stage in chain.stages}
    for module, path in paths.items():
        if module not in inside and any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            yield {path: module}


def drawn(model: Any, seed: int) -> WeightSource:
    """Weights drawn as the library initialises that family, every piece from its own seed: they
    depend on no order.
    """
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}

    def source(modules: Modules) -> Callable[[], dict[str, Tensor]]:
        return partial(make, {path: copy.deepcopy(module, dict(configs)) for path, module in modules.items()})

    def make(skeletons: Modules) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(piece_seed(seed, next(iter(skeletons))))
            for path, skeleton in skeletons.items():
                # in one precision, so that the same seed gives the same weights in every other
                module = copy.deepcopy(skeleton, dict(configs)).float().to_empty(device="cpu")
                module.apply(model._init_weights)
                weights |= {f"{path}.{name}": parameter.detach() for name, parameter in module.named_parameters()}
        return weights

    return source


def piece_seed(seed: int, name: str) -> int:
    """A seed of its own for every piece: 63 bits of SHA-256 of the two."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a weight lies: in which safetensors file, under which name, and what the file's header
    says of it.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of numbers that weights can have, as safetensors calls them."""


def stored_weights(files: list[Path]) -> dict[str, Stored]:
    """What the files hold, by name, from their headers. Raises ConfigError for what is no regular
    file.
    """
    found = {}
    for path in files:
        check_file(path)
        with safetensors.safe_open(path, "pt") as file:
            for name in file.offset_keys():
                part = file.get_slice(name)
                found[name] = Stored(path, name, part.get_dtype(), tuple(part.get_shape()))
    return found


def stored_dtype(stored: Mapping[str, Stored]) -> torch.dtype:
    """The type of the first floating-point numbers in the files; float32 where there are none."""
    return next((FLOATS[weight.dtype] for weight in stored.values() if weight.dtype in FLOATS), torch.float32)


def read(model: nn.Module, stored: Mapping[str, Stored]) -> tuple[WeightSource, set[str]]:
    """Weights read from the files by memory map, and those that stay (norms, buffers) put in place
    now; and the names in the files that are not used.

    Raises ConfigError for weights that are missing, have another shape, or are no floating-point
    numbers.
    """
    same: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(parameter, []).append(name)
    base = f"{getattr(model, 'base_model_prefix', '')}."

    def lookup(names: Sequence[str]) -> Stored | None:
        also = [other for name in names for other in (name, base + name, name.removeprefix(base))]
        return next((stored[name] for name in also if name in stored), None)

    def find(parameter: nn.Parameter) -> Stored:
        names = same[parameter]
        weight = lookup(names)
        if weight is None:
            raise ConfigError(
                f"the files hold no weight {names[0]!r}: the model is not whole, or its family's weights are renamed on loading and "
                "cannot be read one at a time: load it without on_demand"
            )
        if weight.dtype not in FLOATS:
            raise ConfigError(
                f"{str(weight.path)!r} holds quantised weights, {weight.name} as {weight.dtype}: save it unquantised"
            )
        if weight.shape != tuple(parameter.shape):
            raise ConfigError(
                f"{str(weight.path)!r} does not fit its config.json: {weight.name} is {weight.shape}, expected {tuple(parameter.shape)}"
            )
        return weight

    def source(modules: Modules) -> Callable[[], dict[str, Tensor]]:
        wanted = {
            f"{path}.{name}": find(parameter) for path, module in modules.items() for name, parameter in module.named_parameters()
        }
        return partial(_read, wanted)

    state = model.state_dict(keep_vars=True)
    buffers = {name: lookup([name]) for name, value in state.items() if not isinstance(value, nn.Parameter)}
    with torch.no_grad():
        for parameter in same:
            if not parameter.is_meta:
                parameter.copy_(_read({"it": find(parameter)})["it"])
        for name, weight in buffers.items():
            if weight is not None:
                state[name].copy_(_read({name: weight})[name])
    used = {find(parameter).name for parameter in same} | {weight.name for weight in buffers.values() if weight is not None}
    return source, stored.keys() - used


def _read(wanted: Mapping[str, Stored]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in dict.fromkeys(weight.path for weight in wanted.values()):
        try:
            with safetensors.safe_open(path, "pt") as file:
                weights |= {name: file.get_tensor(weight.name) for name, weight in wanted.items() if weight.path == path}
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {str(path)!r}, which was whole before: {error}") from None
    return weights
