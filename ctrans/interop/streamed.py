"""A library's model whose matrices are drawn or read from files when they are used, for models
larger than memory.

A piece is the weights of one sublayer's attention or FFN, or of any other module with a matrix
(embeddings, head).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from ctrans.base.given_files import check_safetensors
from ctrans.base.printable import one_line
from ctrans.dynamics.weights.on_demand import KnownPieces, Piece, Shelf, put_on_demand
from ctrans.interop.anatomy import Anatomy, fields
from ctrans.interop.find_blocks import find_blocks
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
    known = KnownPieces()
    for modules in list(_pieces(model, anatomy)):
        piece = Piece(next(iter(modules)), source(modules))
        for path, module in modules.items():
            put_on_demand(module, piece, shelf, prefix=f"{path}.", known_pieces=known)


def put_in_place(model: nn.Module, anatomy: Anatomy, source: WeightSource) -> None:
    """Fills all matrices of the skeleton from the source for good, which makes it an ordinary
    model.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for modules in list(_pieces(model, anatomy)):
        weights = source(modules)()
        for path, module in modules.items():
            for inner, part in module.named_modules(prefix=path):
                for name, parameter in list(part.named_parameters(recurse=False)):
                    if parameter.is_meta and parameter not in made:
                        made[parameter] = nn.Parameter(
                            weights[f"{inner}.{name}"].to(parameter.dtype), parameter.requires_grad
                        )
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
        if module not in inside and any(
            parameter.is_meta for parameter in module.parameters(recurse=False)
        ):
            yield {path: module}


def drawn(model: Any, seed: int) -> WeightSource:
    """Weights drawn as the library initialises that family. Each piece has its own seed, so the
    order does not matter.
    """
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}

    def source(modules: Modules) -> Callable[[], dict[str, Tensor]]:
        return partial(
            make, {path: deepcopy(module, dict(configs)) for path, module in modules.items()}
        )

    def make(skeletons: Modules) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(piece_seed(seed, next(iter(skeletons))))
            for path, skeleton in skeletons.items():
                # Drawn in float32, so that a seed gives the same weights in each dtype.
                module = deepcopy(skeleton, dict(configs)).float().to_empty(device="cpu")
                module.apply(model._init_weights)
                weights |= {
                    f"{path}.{name}": parameter.detach()
                    for name, parameter in module.named_parameters()
                }
        return weights

    return source


def piece_seed(seed: int, name: str) -> int:
    """The seed of a piece: 63 bits of the SHA-256 of the seed and the piece's name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a weight is stored: its file, its name there, and its dtype and shape.

    `make` reads a weight that is not in a safetensors file as it is.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor] | None = dataclasses.field(default=None, compare=False)


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights by their safetensors names."""
CODES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8}
"""Dtypes of codes that scales next to them turn into weights."""
NAMES = {dtype: name for name, dtype in (FLOATS | CODES).items()}
"""The safetensors names of dtypes."""


def stored_tensor(path: Path, name: str, like: Tensor, make: Callable[[], Tensor]) -> Stored:
    """A weight with the dtype and shape of `like`, which `make` reads."""
    return Stored(
        path,
        name,
        NAMES.get(like.dtype, str(like.dtype).removeprefix("torch.")),
        tuple(like.shape),
        make,
    )


def stored_weights(files: list[Path], index: Mapping[str, str] | None = None) -> dict[str, Stored]:
    """The weights in the files, by name, from the headers. Raises ConfigError for a path that is no
    regular file, for a file that is not complete, and for weights that are not in the file which
    the index, if it has any names, gives for them.
    """
    found: dict[str, Stored] = {}
    for path in files:
        check_safetensors(path)
        try:
            with safetensors.safe_open(path, "pt") as file:
                for name in file.offset_keys():
                    if index and index.get(name) != path.name:
                        if name in index:
                            said = f"expects in {index[name]}"
                        else:
                            said = "does not name"
                        raise ConfigError(
                            f"{str(path)!r} holds {name}, which the index of shards {said}: make"
                            " them agree"
                        )
                    part = file.get_slice(name)
                    found[name] = Stored(path, name, part.get_dtype(), tuple(part.get_shape()))
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(
                f"{str(path)!r} is no complete safetensors file: {one_line(error)}"
            ) from None
    lost = sorted((index or {}).keys() - found.keys())
    if lost:
        raise ConfigError(
            f"the index of shards names {len(lost)} weights that its files do not hold, such as"
            f" {lost[0]}"
        )
    return found


def check_floating(weight: Stored) -> None:
    """Raises ConfigError for a weight that loading would cast: it holds integers, complex numbers,
    or codes of a quantisation.
    """
    if weight.dtype not in FLOATS:
        raise ConfigError(
            f"{str(weight.path)!r} holds {weight.name} as {weight.dtype}, and weights must be"
            f" {', '.join(FLOATS)}: save the model unquantised, in one of these"
        )


def check_tied(model: Any, stored: Mapping[str, Stored]) -> None:
    """Raises ConfigError if the files hold different values for weights that the library's config
    ties. Loading would untie them, or use one of them.
    """
    base = f"{model.base_model_prefix}."
    first = dict[str, Stored]()
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, source in [*((source, source) for source in tied.values()), *tied.items()]:
        one = next(
            (
                stored[each]
                for each in (name, base + name, name.removeprefix(base))
                if each in stored
            ),
            None,
        )
        if one is not None and not same_numbers(other := first.setdefault(source, one), one):
            raise ConfigError(
                f"{str(one.path)!r} holds {one.name} with other values than {other.name}, but its"
                " config.json ties them (tie_word_embeddings): fix one of the two"
            )
    for (
        name,
        source,
    ) in tied.items():  # of a family that renames weights, the library has untied them
        if model.get_parameter_or_buffer(name) is not model.get_parameter_or_buffer(source):
            raise ConfigError(
                f"the files hold {name} with other values than {source}, but the config.json ties"
                " them (tie_word_embeddings): fix one of the two"
            )


def same_numbers(one: Stored, other: Stored) -> bool:
    """Whether two stored weights are the same bytes."""
    if one == other or (one.dtype, one.shape) != (other.dtype, other.shape):
        return one == other
    numbers = (read_weight(each).flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(*numbers)


def stored_dtype(stored: Mapping[str, Stored]) -> torch.dtype:
    """The first floating-point dtype in the files; float32 if there is none."""
    return next(
        (FLOATS[weight.dtype] for weight in stored.values() if weight.dtype in FLOATS),
        torch.float32,
    )


def read(model: nn.Module, stored: Mapping[str, Stored]) -> tuple[WeightSource, set[str]]:
    """Weights read from the files by memory map, and the names in the files that are not used.
    Weights that stay in memory (norms, buffers) are loaded now.

    Raises ConfigError for weights that are missing, have another shape, or are not floating-point
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
        wanted = {
            f"{path}.{name}": find(parameter)
            for path, module in modules.items()
            for name, parameter in module.named_parameters()
        }
        return partial(_read, wanted)

    state = model.state_dict(keep_vars=True)
    buffers = {
        name: lookup([name]) for name, value in state.items() if not isinstance(value, nn.Parameter)
    }
    with torch.no_grad():
        for parameter in same:
            if not parameter.is_meta:
                parameter.copy_(read_weight(find(parameter)))
        for name, weight in buffers.items():
            if weight is not None:
                if state[name].is_floating_point():
                    check_floating(weight)
                state[name].copy_(read_weight(weight))
    for parameter in same:
        find(parameter)
    used = [*(lookup([name]) for names in same.values() for name in names), *buffers.values()]
    return source, stored.keys() - {weight.name for weight in used if weight is not None}


def read_weight(weight: Stored) -> Tensor:
    """The numbers of a stored weight."""
    return _read({"it": weight})["it"]


def _read(wanted: Mapping[str, Stored]) -> dict[str, Tensor]:
    weights = {name: weight.make() for name, weight in wanted.items() if weight.make is not None}
    plain = {name: weight for name, weight in wanted.items() if weight.make is None}
    for path in dict.fromkeys(weight.path for weight in plain.values()):
        try:
            with safetensors.safe_open(path, "pt") as file:
                weights |= {
                    name: file.get_tensor(weight.name)
                    for name, weight in plain.items()
                    if weight.path == path
                }
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(
                f"cannot read {str(path)!r}, which was readable before: {error}"
            ) from None
    return weights
