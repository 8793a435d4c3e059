"""Checkpoints in parts: torch's distributed checkpoints (DCP), and Megatron's torch_dist layout,
which is one of them.

The file `.metadata` is a pickle. `inert` reads it without any class of torch or of others, so that
nothing in it runs.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctrans.base.given_files import check_file, read_file, read_json
from ctrans.base.printable import one_line
from ctrans.interop.pickled import is_dense, load_pickled
from ctrans.interop.streamed import Stored, stored_tensor
from solvers import ConfigError

METADATA, MEGATRON = ".metadata", "metadata.json"
LARGEST_METADATA = 32 << 20
"""The largest size of `.metadata` in bytes; a checkpoint of 200,000 parts has about 30 MB."""
SETTINGS = ("common.pt", "run_config.yaml", "../context/model.yaml")
"""Where the model's settings are: with Megatron, Megatron Bridge and NeMo."""
LESS_ONE = re.compile(
    rb"apply_layernorm_1p(q.|r....|\x94)?\x88|^[ \t]*layernorm_zero_centered_gamma:[ \t]*true\s*$",
    re.M | re.S | re.I,
)
"""The setting of a model that stores gains less 1: in a pickle its name, what remembers the name,
and True; or a line of YAML.
"""
NOT_MODEL = re.compile(
    r"(^|\.)(optim\w*|lr_scheduler|dataloader|rng_state\w*|_extra_state\w*)(\.|$)"
)
"""Names of what a training keeps next to the weights."""
STACKED = re.compile(r"(^|\.)(layers|blocks|h)\.(?!\d)")
"""Names of a weight whose first axis is the number of the block, as Megatron stacks them."""


class Inert:
    """A record in the place of any object of a pickle: its arguments and its state."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        made = object.__new__(cls)
        made.__dict__["args"] = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Inert,), {})


def inert(path: Path) -> Any:
    """The objects of a pickle, each as an `Inert` one. Raises ConfigError for damaged bytes."""
    data = read_file(path, LARGEST_METADATA)
    try:
        for code, argument, _ in pickletools.genops(data):
            if (
                "PUT" in code.name and isinstance(argument, int) and argument > len(data)
            ):  # would reserve memory
                raise ValueError(f"it keeps object {argument}")
        return _Inert(io.BytesIO(data)).load()
    except Exception as error:  # damaged bytes lead to errors of many kinds
        raise ConfigError(
            f"{str(path)!r} is no metadata of a checkpoint: {one_line(error)}"
        ) from None


def distributed_weights(directory: Path) -> dict[str, Stored]:
    """The weights of a distributed checkpoint by name; optimiser states are left out.

    A weight that stacks all blocks gives one weight for each block. Only the parts of a weight that
    are needed are read. Raises ConfigError for another backend of Megatron, for damaged metadata,
    and for parts that are missing or do not fit.
    """
    path = directory / METADATA
    if (directory / MEGATRON).is_file():
        said = read_json(directory / MEGATRON)
        if isinstance(said, dict):
            backend = said.get("sharded_backend")
        else:
            backend = None
        if backend not in ("torch_dist", None):
            raise ConfigError(
                f"{str(directory)!r} has the backend {backend!r} of Megatron: save it as torch_dist"
            )
    try:
        return _weights(directory, vars(inert(path))["state"])
    except ConfigError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} is no metadata of a checkpoint ({type(error).__name__}: {error})"
        ) from None


def gains_less_one(directory: Path) -> bool:
    """Whether Megatron's settings next to the weights say that it stored a norm's gains less 1. It
    looks at their bytes and unpickles nothing.
    """
    return any(
        LESS_ONE.search(read_file(path))
        for name in SETTINGS
        if (path := directory / name).is_file()
    )


def _weights(directory: Path, metadata: Mapping[str, Any]) -> dict[str, Stored]:
    places: dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]] = {}
    sizes: dict[str, int] = {}
    for index, info in metadata["storage_data"].items():
        own = _fields(index)
        at = _fields(info)
        name = str(at["relative_path"])
        if name != Path(name).name or name in ("", ".."):
            raise ConfigError(
                f"{str(directory / METADATA)!r} names {name!r}: parts must be files in the same"
                " directory"
            )
        if at.get("transform_descriptors"):
            raise ConfigError(
                f"{str(directory)!r} has parts that are transformed by"
                f" {at['transform_descriptors']!r}: save them plain"
            )
        if name not in sizes:
            sizes[name] = check_file(directory / name)
        start = int(at["offset"])
        length = int(at["length"])
        if not 0 <= start <= start + length <= sizes[name]:
            raise ConfigError(
                f"{str(directory / name)!r} is not whole: it has {sizes[name]:,} bytes, and a part"
                f" ends at {start + length:,}"
            )
        places[str(own["fqn"]), _shape(own.get("offset"))] = directory / name, start, length
    found: dict[str, Stored] = {}
    for name, entry in metadata["state_dict_metadata"].items():
        about = _fields(entry)
        if "size" not in about or NOT_MODEL.search(name):  # bytes, or not of the model
            continue
        size = _shape(about["size"])
        parts = []
        for chunk in map(_fields, about["chunks"]):
            offsets = _shape(chunk["offsets"])
            parts.append((offsets, _shape(chunk["sizes"]), *places[name, offsets]))
        dtype = getattr(torch, vars(about["properties"])["state"][0].__name__, None)
        _check_parts(directory, name, size, parts)
        if isinstance(dtype, torch.dtype):
            like = torch.empty(size, dtype=dtype, device="meta")
        else:
            like = None
        if like is None:
            raise ConfigError(
                f"{str(directory)!r} holds {name} in a dtype that this torch does not have"
            )
        if len(size) > 1:
            stacked = STACKED.search(name)
        else:
            stacked = None
        for block in range(size[0]) if stacked else [None]:
            if stacked is None:
                one = name
            else:
                one = f"{name[: stacked.end()]}{block}.{name[stacked.end() :]}"
            make = partial(_assembled, name, size, like.dtype, parts, block)
            found[one] = stored_tensor(directory, one, like if block is None else like[0], make)
    if not found:
        raise ConfigError(
            f"{str(directory)!r} holds no weights of a model: give the directory of a distributed"
            " checkpoint"
        )
    return found


def _fields(made: Any) -> Mapping[str, Any]:
    state = vars(made).get("state")
    if isinstance(state, Mapping):
        return state
    return {}


def _shape(size: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size; () for none."""
    if size is None:
        return ()
    return tuple(int(n) for n in (vars(size)["args"][0] if isinstance(size, Inert) else size))


def _check_parts(directory: Path, name: str, size: tuple[int, ...], parts: list[Any]) -> None:
    """Raises ConfigError unless the parts lie inside of the weight, fill it, and have its bytes."""
    inside = all(
        len(size) == len(offsets) == len(sizes)
        and all(0 <= a <= a + n <= whole for a, n, whole in zip(offsets, sizes, size, strict=True))
        for offsets, sizes, *_ in parts
    )
    numbers = sum(math.prod(sizes) for _, sizes, *_ in parts)
    bytes_ = sum(length for *_, length in parts)
    if not inside or numbers != math.prod(size) or numbers > bytes_:
        raise ConfigError(
            f"{str(directory)!r} does not hold all of {name}: its parts have {numbers:,} of"
            f" {math.prod(size):,} numbers"
        )


def _assembled(
    name: str, size: tuple[int, ...], dtype: torch.dtype, parts: list[Any], block: int | None
) -> Tensor:
    """The weight, or its slice for a block, from the parts that it needs."""
    whole = torch.empty(size if block is None else size[1:], dtype=dtype)
    for offsets, sizes, path, start, length in parts:
        if block is not None and not offsets[0] <= block < offsets[0] + sizes[0]:
            continue
        try:
            with path.open("rb") as file:
                file.seek(start)
                part = load_pickled(path, file.read(length))
        except OSError as error:
            raise ConfigError(
                f"cannot read {str(path)!r}, which was readable before: {error}"
            ) from None
        if not is_dense(part) or tuple(part.shape) != sizes or part.dtype != dtype:
            raise ConfigError(
                f"{str(path)!r} does not hold the part of {name} that its {METADATA} describes"
            )
        inside = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        if block is None:
            whole[inside] = part
        else:
            whole[inside[1:]] = part[block - offsets[0]]
    return whole
