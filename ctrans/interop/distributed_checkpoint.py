"""Checkpoints in parts: torch's distributed checkpoints (DCP), and Megatron's torch_dist layout,
which is one of them.

The file `.metadata` is a pickle. `inert` reads it without any class of torch or of others, so that
nothing in it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctrans.base.given_files import check_file, read_file, read_json
from ctrans.dynamics.depth import MOST_BLOCKS
from ctrans.interop.inert_pickles import Inert, inert
from ctrans.interop.nested_names import names_of_model
from ctrans.interop.pickled import is_dense, load_pickled
from ctrans.interop.stored_weights import Stored, stored_tensor
from ctrans.interop.training_state import without_state
from ctrans.interop.weights_in_objects import say_left_out
from solvers import ConfigError, shown

METADATA = ".metadata"
MEGATRON = "metadata.json"
SETTINGS = ("common.pt", "run_config.yaml", "../context/model.yaml")
"""Where the model's settings are: with Megatron, Megatron Bridge and NeMo."""
MOST_NUMBERS = 1 << 48
"""The most numbers of a weight, or along one of its axes: what no machine holds."""
MOST_AXES = 64
"""The most axes of a tensor in torch."""
LESS_ONE = re.compile(
    rb"apply_layernorm_1p(q.|r....|\x94)?\x88"
    rb"|^[^#\n]*?(?<![\w.-])[\"']?layernorm_zero_centered_gamma[\"']?[ \t]*:[ \t]*(!!bool[ \t]+)?"
    rb"[\"']?(true|yes|on)[\"']?[ \t]*([,}#]|\r?$)",
    re.M | re.S | re.I,
)
"""The setting of a model that stores gains less 1: in a pickle its name, what remembers the name,
and True; or YAML: a line, or an entry in braces, with quotes or a comment.
"""
STACKED = re.compile(r"(^|\.)(layers|blocks|h)\.(?!\d)")
"""Names of a weight whose first axis is the number of the block, as Megatron stacks them."""


def distributed_weights(directory: Path) -> dict[str, Stored]:
    """The weights of a distributed checkpoint by name; optimiser states are left out.

    A weight that stacks all blocks gives one weight for each block. Only the parts of a weight that
    are needed are read. Raises ConfigError for another backend of Megatron, for damaged metadata,
    and for parts that are missing or do not fit.
    """
    path = directory / METADATA
    if (directory / MEGATRON).is_file():
        settings = read_json(directory / MEGATRON)
        if isinstance(settings, dict):
            backend = settings.get("sharded_backend")
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
    paths = [directory / name for name in SETTINGS]
    return any(LESS_ONE.search(read_file(path)) for path in paths if path.is_file())


PlaceInFile = tuple[Path, int, int]
"""Where a part of a weight is: the file, the first byte and the number of bytes."""
StoredPart = tuple[tuple[int, ...], tuple[int, ...], Path, int, int]
"""A part of a weight: its offsets and sizes along each axis, and its place."""


def _weights(directory: Path, metadata: Mapping[str, Any]) -> dict[str, Stored]:
    places = _places(directory, metadata["storage_data"])
    weights: dict[str, Stored] = {}
    tensors = {
        name: _fields(entry)
        for name, entry in metadata["state_dict_metadata"].items()
        if "size" in _fields(entry)  # no bytes
    }
    tensors, of_training = without_state(directory, tensors)
    keys_of = metadata.get("planner_data")
    if not isinstance(keys_of, Mapping):
        keys_of = {}
    of_model, left_out = names_of_model(directory, tensors, keys_of)
    say_left_out(directory, [*of_training, *left_out])
    for name, fields in tensors.items():
        if name not in of_model:
            continue
        size = _shape(fields["size"])
        parts: list[StoredPart] = []
        for chunk in map(_fields, fields["chunks"]):
            offsets = _shape(chunk["offsets"])
            if (name, offsets) not in places:
                raise ConfigError(
                    f"{str(directory / METADATA)!r} does not say where the part of {name} at"
                    f" {offsets} is stored: save the checkpoint again"
                )
            parts.append((offsets, _shape(chunk["sizes"]), *places[name, offsets]))
        dtype = getattr(torch, vars(fields["properties"])["state"][0].__name__, None)
        _check_parts(directory, name, size, parts)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(
                f"{str(directory)!r} holds {name} in a dtype that this torch does not have"
            )
        like = torch.empty(size, dtype=dtype, device="meta")
        stacked = STACKED.search(name)
        if len(size) > 1 and stacked is not None:
            before = name[: stacked.end()]
            after = name[stacked.end() :]
            for block in range(size[0]):
                block_name = f"{before}{block}.{after}"
                make = partial(_assembled, name, size, dtype, parts, block)
                _add(weights, stored_tensor(directory, block_name, like[0], make))
        else:
            make = partial(_assembled, name, size, dtype, parts, None)
            _add(weights, stored_tensor(directory, name, like, make))
    if not weights:
        raise ConfigError(
            f"{str(directory)!r} holds no weights of a model: give the directory of a distributed"
            " checkpoint"
        )
    return weights


def _add(weights: dict[str, Stored], weight: Stored) -> None:
    """Adds the weight. Raises ConfigError if there is one of its name: a stack of all blocks and
    the weight of one block may both give it.
    """
    if weight.name in weights:
        raise ConfigError(
            f"{str(weight.path)!r} holds {weight.name} twice, as a weight and in a stack of all"
            " blocks: save one of the two"
        )
    weights[weight.name] = weight


def _places(
    directory: Path, storage: Mapping[Any, Any]
) -> dict[tuple[str, tuple[int, ...]], PlaceInFile]:
    """The place of each part, by the weight's name and the part's offsets. Raises ConfigError for
    files elsewhere, and for parts beyond a file's end.
    """
    places: dict[tuple[str, tuple[int, ...]], PlaceInFile] = {}
    sizes: dict[str, int] = {}
    for index, info in storage.items():
        part = _fields(index)
        stored = _fields(info)
        name = stored["relative_path"]
        if not isinstance(name, str):
            raise TypeError("a part's relative_path is no text")
        if name != Path(name).name or name in ("", ".."):
            raise ConfigError(
                f"{str(directory / METADATA)!r} names {name!r}: parts must be files in the same"
                " directory"
            )
        if stored.get("transform_descriptors"):
            raise ConfigError(
                f"{str(directory)!r} has parts that are transformed, as compressed ones are: save"
                " them plain"
            )
        if name not in sizes:
            sizes[name] = check_file(directory / name)
        start = int(stored["offset"])
        length = int(stored["length"])
        if start < 0 or length < 0:
            raise ConfigError(
                f"{str(directory / METADATA)!r} gives a part of {name} the offset {shown(start)}"
                f" and the length {shown(length)}: both must be 0 or more"
            )
        if start + length > sizes[name]:
            raise ConfigError(
                f"{str(directory / name)!r} is not whole: it has {sizes[name]:,} bytes, and a part"
                f" ends at {shown(start + length)}"
            )
        if not isinstance(part["fqn"], str):
            raise TypeError("the name of a weight is no text")
        places[part["fqn"], _shape(part.get("offset"))] = directory / name, start, length
    return places


def _fields(record: Any) -> Mapping[str, Any]:
    """The state of an `Inert` record; empty if it is no mapping."""
    state = vars(record).get("state")
    if isinstance(state, Mapping):
        return state
    return {}


def _shape(size: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size; () for none."""
    if size is None:
        return ()
    if isinstance(size, Inert):
        size = vars(size)["args"][0]
    axes = tuple(int(n) for n in size)
    if len(axes) > MOST_AXES or any(abs(n) > MOST_NUMBERS for n in axes):
        raise ConfigError(
            f"a weight has the size {shown(list(axes))}: give at most {MOST_AXES} axes, each of at"
            f" most {MOST_NUMBERS:,}"
        )
    return axes


def _check_parts(
    directory: Path, name: str, size: tuple[int, ...], parts: list[StoredPart]
) -> None:
    """Raises ConfigError unless the parts lie inside of the weight, cover each of its numbers once,
    and have its bytes.
    """
    if any(n < 0 for n in size) or math.prod(size) > MOST_NUMBERS:
        raise ConfigError(
            f"{str(directory)!r} gives {name} the size {size}: each axis has 0 or more, and a"
            f" weight at most {MOST_NUMBERS:,} numbers"
        )
    if STACKED.search(name) and len(size) > 1 and size[0] > MOST_BLOCKS:
        raise ConfigError(
            f"{str(directory)!r} stacks {size[0]:,} blocks in {name}: a model has at most"
            f" {MOST_BLOCKS:,}"
        )
    inside = all(_is_inside(offsets, sizes, size) for offsets, sizes, *_ in parts)
    numbers = sum(math.prod(sizes) for _, sizes, *_ in parts)
    number_of_bytes = sum(length for *_, length in parts)
    if not inside or numbers != math.prod(size) or numbers > number_of_bytes:
        raise ConfigError(
            f"{str(directory)!r} does not hold all of {name}: its parts have {numbers:,} of"
            f" {math.prod(size):,} numbers"
        )
    if _overlap(parts):
        raise ConfigError(
            f"{str(directory)!r} holds numbers of {name} twice, and others not at all: two of its"
            " parts overlap"
        )


def _overlap(parts: Sequence[StoredPart]) -> bool:
    """Whether two of the parts have a number in common; an empty part has none."""
    boxes = [
        (offsets, tuple(a + n for a, n in zip(offsets, sizes, strict=True)))
        for offsets, sizes, *_ in parts
        if all(sizes)
    ]
    if len(boxes) < 2:
        return False
    if not boxes[0][0]:
        return True  # parts of a single number, which has no axes
    # Only parts that overlap along the axis of most divisions are compared in full.
    divisions = [len(set(along)) for along in zip(*(starts for starts, _ in boxes), strict=True)]
    axis = divisions.index(max(divisions))
    boxes.sort(key=lambda box: box[0][axis])
    for i, (starts, ends) in enumerate(boxes):
        for later_starts, later_ends in boxes[i + 1 :]:
            if later_starts[axis] >= ends[axis]:
                break
            overlaps = all(
                start < later_end and later_start < end
                for start, end, later_start, later_end in zip(
                    starts, ends, later_starts, later_ends, strict=True
                )
            )
            if overlaps:
                return True
    return False


def _is_inside(offsets: tuple[int, ...], sizes: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Whether a part with these offsets and sizes lies inside of a weight of this size."""
    if not len(size) == len(offsets) == len(sizes):
        return False
    return all(
        0 <= start <= start + length <= end
        for start, length, end in zip(offsets, sizes, size, strict=True)
    )


def _assembled(
    name: str, size: tuple[int, ...], dtype: torch.dtype, parts: list[StoredPart], block: int | None
) -> Tensor:
    """The weight, or its slice for a block, from the parts that it needs."""
    if block is None:
        weight = torch.empty(size, dtype=dtype)
    else:
        weight = torch.empty(size[1:], dtype=dtype)
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
        slices = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        if block is None:
            weight[slices] = part
        else:
            weight[slices[1:]] = part[block - offsets[0]]
    return weight
