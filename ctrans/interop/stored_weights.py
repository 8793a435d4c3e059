"""Weights in files: where each is stored, and its numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from ctrans.base.given_files import check_name, check_safetensors
from ctrans.base.printable import one_line
from solvers import ConfigError


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
COMPLEX = frozenset(("C64", "complex32", "complex64", "complex128"))
"""Dtypes of complex numbers, by the names of safetensors and of torch."""
BELOW_A_BYTE = ("F4", "F6")
"""How the names of dtypes of less than a byte begin, which torch does not read."""
NAMES = {dtype: name for name, dtype in (FLOATS | CODES).items()}
"""The safetensors names of dtypes."""


def stored_tensor(path: Path, name: str, like: Tensor, make: Callable[[], Tensor]) -> Stored:
    """A weight with the dtype and shape of `like`, which `make` reads."""
    dtype = NAMES.get(like.dtype, str(like.dtype).removeprefix("torch."))
    return Stored(path, name, dtype, tuple(like.shape), make)


def stored_weights(files: list[Path], index: Mapping[str, str] | None = None) -> dict[str, Stored]:
    """The weights in the files, by name, from the headers. Raises ConfigError for a path that is no
    regular file, for a file that is not complete, and for weights that are not in the file which
    the index, if it has any names, gives for them.
    """
    weights: dict[str, Stored] = {}
    for path in files:
        check_name(path)
        check_safetensors(path)
        try:
            with safetensors.safe_open(path, "pt") as file:
                names = list(file.offset_keys())
                check_shard(path, names, index or {})
                for name in names:
                    part = file.get_slice(name)
                    weights[name] = Stored(path, name, part.get_dtype(), tuple(part.get_shape()))
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(
                f"{str(path)!r} is no complete safetensors file: {one_line(error)}"
            ) from None
    check_all_found(weights, index or {})
    return weights


def check_shard(path: Path, names: Iterable[str], index: Mapping[str, str]) -> None:
    """Raises ConfigError for weights in a file which the index of shards, if it has any names,
    gives another file, or does not name.
    """
    for name in names:
        if not index or index.get(name) == path.name:
            continue
        if name in index:
            problem = f"expects in {index[name]}"
        else:
            problem = "does not name"
        raise ConfigError(
            f"{str(path)!r} holds {name}, which the index of shards {problem}: make them agree"
        )


def check_all_found(names: Iterable[str], index: Mapping[str, str]) -> None:
    """Raises ConfigError for weights that the index of shards names and no file holds."""
    lost = sorted(index.keys() - set(names))
    if lost:
        raise ConfigError(
            f"the index of shards names {len(lost)} weights that its files do not hold, such as"
            f" {lost[0]}"
        )


def check_readable(stored: Mapping[str, Stored]) -> None:
    """Raises ConfigError for weights in a dtype of less than a byte, and for a number in a name
    that is not of ASCII digits: the library's own errors say nothing of the file.
    """
    for name, weight in stored.items():
        if weight.dtype.startswith(BELOW_A_BYTE):
            check_floating(weight)
        for part in name.split("."):
            if part.isdigit() and not part.isascii():
                raise ConfigError(
                    f"{str(weight.path)!r} holds {name!r}, and {part!r} is no number in ASCII"
                    " digits: rename the weight"
                )


def check_floating(weight: Stored) -> None:
    """Raises ConfigError for a weight that loading would cast: it holds integers, complex numbers,
    or codes of a quantisation.
    """
    if weight.dtype not in FLOATS:
        raise ConfigError(
            f"{str(weight.path)!r} holds {weight.name} as {weight.dtype}, and weights must be"
            f" {', '.join(FLOATS)}: save the model unquantised, in one of these"
        )


def same_numbers(a: Stored, b: Stored) -> bool:
    """Whether two stored weights are the same bytes."""
    if a == b:
        return True
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bytes_of_a = read_weight(a).flatten().view(torch.uint8)
    bytes_of_b = read_weight(b).flatten().view(torch.uint8)
    return torch.equal(bytes_of_a, bytes_of_b)


def stored_dtype(stored: Mapping[str, Stored]) -> torch.dtype:
    """The first floating-point dtype in the files; float32 if there is none."""
    for weight in stored.values():
        if weight.dtype in FLOATS:
            return FLOATS[weight.dtype]
    return torch.float32


def read_weight(weight: Stored) -> Tensor:
    """The numbers of a stored weight."""
    return read_numbers({weight.name: weight})[weight.name]


def read_numbers(stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The numbers of these weights. A file of safetensors is opened once."""
    weights = {name: weight.make() for name, weight in stored.items() if weight.make is not None}
    plain = {name: weight for name, weight in stored.items() if weight.make is None}
    for path in dict.fromkeys(weight.path for weight in plain.values()):
        try:
            with safetensors.safe_open(path, "pt") as file:
                for name, weight in plain.items():
                    if weight.path == path:
                        weights[name] = file.get_tensor(weight.name)
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(
                f"cannot read {str(path)!r}, which was readable before: {error}"
            ) from None
    return weights
