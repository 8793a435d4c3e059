"""Pickles read without any class of torch or of others, so that nothing in them runs. They are
first read in a process with limits: a few bytes can keep a reader busy without end.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ctrans.base.given_files import read_file
from ctrans.base.printable import one_line
from ctrans.interop.subprocess_guard import run_guarded
from solvers import ConfigError

LARGEST_METADATA = 32 << 20
"""The largest size of a pickle of metadata in bytes; a checkpoint of 200,000 parts has 30 MB."""
SECONDS = 15
"""The limit of a first reading in processor seconds; 200,000 parts take 2."""
MEMORY = 1 << 30
"""The limit of a first reading in bytes, besides that for each byte of the pickle."""
MEMORY_PER_BYTE = 64
"""Records of a pickle need 20 times its size."""


class Inert:
    """A record in the place of any object of a pickle: its arguments and its state."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        record = object.__new__(cls)
        record.__dict__["args"] = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """An entry of a dictionary's class, as of OrderedDict; nobody asks for it."""


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Inert,), {})


class _Storages(_Inert):
    """Notes the storages of tensors: the number of the file's part, and the bytes."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.sizes: dict[str, int] = {}

    def persistent_load(self, pid: Any) -> None:
        _, storage_type, key, _, entries = pid
        kind = getattr(torch, storage_type.__name__)
        if kind is torch.UntypedStorage:
            self.sizes[key] = entries
        else:
            self.sizes[key] = entries * kind.dtype.itemsize


def inert(path: Path) -> Any:
    """The objects of a pickle, each as an `Inert` one. Raises ConfigError for damaged bytes, and
    for a pickle that exceeds the limits.
    """
    data = read_file(path, LARGEST_METADATA)
    memory = MEMORY + MEMORY_PER_BYTE * len(data)
    try:
        run_guarded(partial(_try, data), seconds=SECONDS, memory=memory)
        return _load(data)
    except Exception as error:  # damaged bytes lead to errors of many kinds
        raise ConfigError(
            f"{str(path)!r} is no metadata of a checkpoint: {one_line(error)}"
        ) from None


def _load(data: bytes) -> Any:
    for code, argument, _ in pickletools.genops(data):
        if "PUT" not in code.name or not isinstance(argument, int):
            continue
        if argument > len(data):  # would reserve memory
            raise ValueError(f"it keeps object {argument}")
    return _Inert(io.BytesIO(data)).load()


def _try(data: bytes) -> None:
    _load(data)


def storage_sizes(data: bytes) -> dict[str, int]:
    """The bytes of each storage of a pickle of torch.save, by the number of the file's part that
    has them. Call it in a process with limits. Raises errors of many kinds for damaged bytes.
    """
    reader = _Storages(io.BytesIO(data))
    reader.load()
    return reader.sizes
