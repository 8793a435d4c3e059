"""Files that torch.save wrote, read by torch's restricted unpickler: it builds tensors and plain
containers, and runs no code of the file.
"""

from __future__ import annotations

import errno
import functools
import io
import pickle
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctrans.base.given_files import cannot_read, check_file, check_name
from ctrans.base.memory import check_fits
from ctrans.interop.foreign_errors import named_error
from ctrans.interop.inert_pickles import storage_sizes
from ctrans.interop.stored_weights import Stored, stored_tensor
from ctrans.interop.subprocess_guard import run_guarded
from ctrans.interop.weights_in_objects import named_tensors, say_left_out
from solvers import ConfigError

PICKLE = b"\x80"
"""The first byte of a pickle of protocol 2 or newer."""
SECONDS = 15
"""The limit of a first reading without the weights, in processor seconds. A pickle of 100,000 names
takes 2 seconds.
"""
MEMORY = 512 << 20
"""The limit of a first reading without the weights, in bytes."""
AT_ONCE = 1 << 20
"""The bytes of a part that are read at once."""


def load_pickled(
    path: Path, part: bytes | None = None, *, mapped: bool = False, tried: bool = False
) -> Any:
    """What the file holds, or its `part`; with `mapped`, tensors come from a memory map. It is
    first read in a process with limits, unless that was `tried`.

    Raises ConfigError for a file that holds more than weights, is not whole, exceeds the memory or
    the limits, or is compressed, which torch.save never does.
    """
    file: Any
    if part is None:
        size = check_file(path)
        file = path
    else:
        size = len(part)
        file = io.BytesIO(part)
    if not mapped:
        check_fits(size, "it cannot be read in parts")
    load = partial(torch.load, file, map_location="cpu", weights_only=True)
    try:
        unpacked = _unpacked(file)
        storages: dict[str, int] = {}
        if not tried and unpacked <= size:
            in_parts = part is None and unpacked > 0
            attempt = partial(_try, load, file, mmap=in_parts)
            storages = run_guarded(attempt, seconds=SECONDS, memory=MEMORY + 2 * size)
            if part is not None:
                file.seek(0)
        if unpacked <= size:
            content = load(mmap=mapped)
            if unpacked and not tried:
                _check_archive(file, storages)
            return content
    except ConfigError as error:
        raise ConfigError(
            f"{str(path)!r} is not read: {error}; a model of its size needs less"
        ) from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # an archive that was cut gives places outside of the file
            raise _not_whole(path, "it ends too early") from None
        raise cannot_read(path, error) from None
    except pickle.UnpicklingError as error:
        if not _begins_as_saved(path, part):
            raise _not_whole(path, named_error(error)) from None
        raise ConfigError(
            f"{str(path)!r} holds more than weights and is not read, as that may run code: save"
            " weights only"
        ) from None
    # Damaged bytes lead torch to KeyError, IndexError, TypeError, AssertionError and more.
    except Exception as error:
        raise _not_whole(path, named_error(error)) from None
    raise ConfigError(
        f"{str(path)!r} has {size:,} bytes and would unpack to {unpacked:,}: torch.save does not"
        " compress, so it is not read"
    )


def _not_whole(path: Path, reason: str) -> ConfigError:
    """The error for a file that torch cannot unpack, with the first sentence of the reason."""
    reason = reason.partition(". ")[0]
    return ConfigError(
        f"{str(path)!r} is no whole file of torch.save: copy or save it again ({reason})"
    )


def _begins_as_saved(path: Path, part: bytes | None) -> bool:
    """Whether the file is an archive or a pickle, of which torch.save writes the latter for older
    versions.
    """
    if part is not None:
        return part.startswith(PICKLE) or zipfile.is_zipfile(io.BytesIO(part))
    with path.open("rb") as file:
        return file.read(len(PICKLE)) == PICKLE or zipfile.is_zipfile(path)


def _try(load: Callable[..., Any], file: Any, *, mmap: bool) -> dict[str, int]:
    """Loads the file, drops the result, and returns the sizes of its storages. A fault of the file
    is raised again, in full, without limits.
    """
    try:
        load(mmap=mmap)
    except MemoryError:
        raise
    except Exception:
        return {}
    if not zipfile.is_zipfile(file):
        return {}
    with zipfile.ZipFile(file) as archive:
        entry = archive.getinfo(f"{_root(archive)}/data.pkl")
        del entry.CRC  # sums are checked later, where the file has any
        return storage_sizes(archive.read(entry))


def _root(archive: zipfile.ZipFile) -> str:
    """The directory of all parts of an archive of torch.save."""
    return archive.infolist()[0].filename.partition("/")[0]


def _check_archive(file: Any, storages: Mapping[str, int]) -> None:
    """Raises ValueError or BadZipFile for an archive that torch.save did not write so: torch maps
    its parts without a look at their sizes, compression and sums.
    """
    with zipfile.ZipFile(file) as archive:
        sizes: dict[str, int] = {}
        for entry in archive.infolist():
            name = entry.filename
            if name in sizes:
                raise ValueError(f"it has {name} twice")
            sizes[name] = entry.file_size
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed, which torch.save never does")
            if entry.CRC == 0:  # torch can be set to write no sums
                continue
            with archive.open(entry) as stored:
                while stored.read(AT_ONCE):  # raises an error at the end for another sum
                    pass
        for key, size in storages.items():
            name = f"{_root(archive)}/data/{key}"
            if sizes.get(name) != size:
                raise ValueError(
                    f"{name} has {sizes.get(name, 0):,} bytes, and its tensors need {size:,}"
                )


def _unpacked(file: Any) -> int:
    """The size of an archive's content; 0 for another file, for which torch.load raises the
    error.
    """
    try:
        if not zipfile.is_zipfile(file):
            return 0
        with zipfile.ZipFile(file) as archive:
            return sum(part.file_size for part in archive.infolist())
    # OSError: an archive that was cut gives places before its beginning
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return 0
    finally:
        if isinstance(file, io.BytesIO):
            file.seek(0)


def pickled_weights(path: Path) -> dict[str, Stored]:
    """The weights of a `pytorch_model.bin` by name. A file of torch 1.6 or newer is read tensor by
    tensor; an older one stays in memory. Errors as `load_pickled`, and for a file without weights.
    """
    check_file(path)
    check_name(path)
    mapped = zipfile.is_zipfile(path)
    weights, left_out = _weights(path, mapped=mapped)
    say_left_out(path, left_out)
    if mapped:
        make = partial(_one, path)
    else:
        make = partial(dict.__getitem__, weights)
    return {
        name: stored_tensor(path, name, value, partial(make, name))
        for name, value in weights.items()
    }


def _weights(
    path: Path, *, mapped: bool, tried: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors by name, and what else the file holds."""
    content = load_pickled(path, mapped=mapped, tried=tried)
    tensors, left_out = named_tensors(path, content)
    for name, value in tensors.items():
        if not is_dense(value):
            raise ConfigError(
                f"{str(path)!r} holds {name}, which is no dense tensor with a number for each"
                " entry: save it as one"
            )
    return tensors, left_out


def _one(path: Path, name: str) -> Tensor:
    try:
        state = path.stat()
    except OSError as error:
        raise cannot_read(path, error) from None
    return _mapped(path, state.st_mtime_ns, state.st_size)[name]


@functools.lru_cache(maxsize=1)
def _mapped(path: Path, changed: int, size: int) -> dict[str, Tensor]:
    """The weights of the file that was read last, as a memory map, so that reading one after the
    other opens it once. A file that `changed`, or has another `size`, is opened anew.
    """
    weights, _ = _weights(path, mapped=True, tried=True)
    return weights


def is_dense(value: object) -> bool:
    """Whether it is a dense tensor whose storage holds all of its numbers; a view may repeat a few
    without end.
    """
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    if value.is_meta or value.is_quantized:
        return False
    return value.numel() * value.itemsize <= value.untyped_storage().nbytes()
