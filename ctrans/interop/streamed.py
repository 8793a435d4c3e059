"""A library's model whose matrices are drawn or read from files when they are used, for models
larger than memory.

A piece is the weights of one sublayer's attention or FFN, or of any other module with a matrix
(embeddings, head).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.weights.on_demand import KnownPieces, Piece, Shelf, put_on_demand
from ctrans.interop.anatomy import Anatomy, fields
from ctrans.interop.find_blocks import find_blocks
from ctrans.interop.stored_weights import (
    Stored,
    check_floating,
    read_numbers,
    read_weight,
    same_numbers,
)
from solvers import ConfigError

Modules = Mapping[str, nn.Module]
"""Modules by their paths in a model."""
WeightSource = Callable[[Modules], Callable[[], dict[str, Tensor]]]
"""From the modules of a piece, without their matrices, to a function that makes the piece's weights
by name.
"""


def put_model_on_demand(model: nn.Module, anatomy: Anatomy, source: WeightSource) -> None:
    """Makes the skeleton's matrices come from the source when they are used; one piece is in memory
    at a time.
    """
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_meta)
    shelf = Shelf(dtype)
    known_pieces = KnownPieces()
    for modules in list(_pieces(model, anatomy)):
        piece = Piece(next(iter(modules)), source(modules))
        for path, module in modules.items():
            put_on_demand(module, piece, shelf, prefix=f"{path}.", known_pieces=known_pieces)


def put_in_place(model: nn.Module, anatomy: Anatomy, source: WeightSource) -> None:
    """Fills all matrices of the skeleton from the source for good, which makes it an ordinary
    model.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for modules in list(_pieces(model, anatomy)):
        weights = source(modules)()
        for path, module in modules.items():
            for inner, part in module.named_modules(prefix=path):
                for name, parameter in list(part.named_parameters(recurse=False)):
                    if not parameter.is_meta:
                        continue
                    if parameter not in filled:
                        numbers = weights[f"{inner}.{name}"].to(parameter.dtype)
                        filled[parameter] = nn.Parameter(numbers, parameter.requires_grad)
                    setattr(part, name, filled[parameter])


def _pieces(model: nn.Module, anatomy: Anatomy) -> Iterator[dict[str, nn.Module]]:
    """The modules of each piece by path: maps of the blocks, then what else has a matrix."""
    paths = {module: path for path, module in model.named_modules()}
    inside: set[nn.Module] = set()
    for block in find_blocks(model, anatomy):
        for chain in fields(block, anatomy):
            inside |= {part for stage in chain.stages for part in stage.modules()}
            yield {paths[stage]: stage for stage in chain.stages}
    for module, path in paths.items():
        if module in inside:
            continue
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            yield {path: module}


def drawn(model: Any, seed: int) -> WeightSource:
    """Weights drawn as the library initialises that family. Each piece has its own seed, so the
    order does not matter.
    """
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}

    def source(modules: Modules) -> Callable[[], dict[str, Tensor]]:
        skeletons = {path: deepcopy(module, dict(configs)) for path, module in modules.items()}
        return partial(make, skeletons)

    def make(skeletons: Modules) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(piece_seed(seed, next(iter(skeletons))))
            for path, skeleton in skeletons.items():
                # Drawn in float32, so that a seed gives the same weights in each dtype.
                module = deepcopy(skeleton, dict(configs)).float().to_empty(device="cpu")
                module.apply(model._init_weights)
                for name, parameter in module.named_parameters():
                    weights[f"{path}.{name}"] = parameter.detach()
        return weights

    return source


def piece_seed(seed: int, name: str) -> int:
    """The seed of a piece: 63 bits of the SHA-256 of the seed and the piece's name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def check_tied(model: Any, stored: Mapping[str, Stored]) -> None:
    """Raises ConfigError if the files hold different values for weights that the library's config
    ties. Loading would untie them, or use one of them.
    """
    base = f"{model.base_model_prefix}."
    first = dict[str, Stored]()
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, source in [*((source, source) for source in tied.values()), *tied.items()]:
        weight = stored_as(name, base, stored)
        if weight is None:
            continue
        first_weight = first.setdefault(source, weight)
        if not same_numbers(first_weight, weight):
            raise ConfigError(
                f"{str(weight.path)!r} holds {weight.name} with other values than"
                f" {first_weight.name}, but its config.json ties them (tie_word_embeddings): fix"
                " one of the two"
            )
    # of a family that renames weights, the library has untied them
    for name, source in tied.items():
        if model.get_parameter_or_buffer(name) is not model.get_parameter_or_buffer(source):
            raise ConfigError(
                f"the files hold {name} with other values than {source}, but the config.json ties"
                " them (tie_word_embeddings): fix one of the two"
            )


def read(model: nn.Module, stored: Mapping[str, Stored]) -> tuple[WeightSource, set[str]]:
    """Weights read from the files by memory map, and the names in the files that are not used.
    Weights that stay in memory (norms, buffers) are loaded now.

    Raises ConfigError for weights that are missing, have another shape, or are not floating-point
    numbers.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    base = f"{getattr(model, 'base_model_prefix', '')}."

    def lookup(names: Sequence[str]) -> Stored | None:
        for name in names:
            weight = stored_as(name, base, stored)
            if weight is not None:
                return weight
        return None

    def find(parameter: nn.Parameter) -> Stored:
        names = names_of[parameter]
        weight = lookup(names)
        if weight is None:
            raise ConfigError(
                f"the files hold no weight {names[0]!r}: the model is not complete, or its family"
                " renames weights when it loads them: load it without on_demand"
            )
        check_floating(weight)
        if weight.shape != tuple(parameter.shape):
            raise ConfigError(
                f"{str(weight.path)!r} does not fit its config.json: {weight.name} is"
                f" {weight.shape}, expected {tuple(parameter.shape)}"
            )
        return weight

    def source(modules: Modules) -> Callable[[], dict[str, Tensor]]:
        weights = {
            f"{path}.{name}": find(parameter)
            for path, module in modules.items()
            for name, parameter in module.named_parameters()
        }
        return partial(read_numbers, weights)

    state = model.state_dict(keep_vars=True)
    buffers = {
        name: lookup([name]) for name, value in state.items() if not isinstance(value, nn.Parameter)
    }
    with torch.no_grad():
        for parameter in names_of:
            if not parameter.is_meta:
                parameter.copy_(read_weight(find(parameter)))
        for name, weight in buffers.items():
            if weight is not None:
                if state[name].is_floating_point():
                    check_floating(weight)
                state[name].copy_(read_weight(weight))
    for parameter in names_of:
        find(parameter)
    parameters = [lookup([name]) for names in names_of.values() for name in names]
    used = {weight.name for weight in (*parameters, *buffers.values()) if weight is not None}
    return source, stored.keys() - used


def stored_as(name: str, base: str, stored: Mapping[str, Stored]) -> Stored | None:
    """The weight of that name, with or without the prefix of the family's base model."""
    for stored_name in (name, base + name, name.removeprefix(base)):
        if stored_name in stored:
            return stored[stored_name]
    return None
