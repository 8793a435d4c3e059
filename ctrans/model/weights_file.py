"""Files of weights: safetensors with a checksum, written whole or not at all, and never a pickle.

The metadata hold the checksum, because safetensors does not detect a flipped bit in a weight.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ctrans.base.durable_files import write_durably
from ctrans.base.given_files import check_safetensors, read_file
from solvers import ConfigError

CHECKSUM = "crc32"
"""The key of the checksum in the metadata. A file without it is not checked."""
PICKLES = {b"PK\x03\x04": "a zip archive, as torch.save writes", b"\x80": "a pickle"}
"""The first bytes of files that are often mistaken for weights. ctrans never reads them."""


def write_weights(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes the weights with their checksum. Raises OSError."""
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    metadata = {"format": "pt", **metadata, CHECKSUM: _checksum(sorted(tensors.items()))}
    write_durably(path, safetensors_bytes(tensors, metadata))


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights and their metadata. Raises ConfigError for a file of another format or a damaged
    file.
    """
    data = read_file(path)
    pickle_format = _pickle_format(data)
    if pickle_format is None:
        check_safetensors(path)
    try:
        weights = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        reason = str(error)
        if pickle_format is not None:
            reason = f"it is {pickle_format}, and reading that may run code"
        raise ConfigError(f"{str(path)!r} is no complete safetensors file: {reason}") from None
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    if metadata.get(CHECKSUM) not in (None, _checksum(sorted(weights.items()))):
        raise _damaged(path)
    for name, weight in weights.items():
        if not weight.is_floating_point() or weight.itemsize < 2:
            raise ConfigError(
                f"{str(path)!r} is damaged: {name} holds {weight.dtype}, and weights are"
                " floating-point numbers of at least two bytes"
            )
    return weights, metadata


def check_checksum(path: Path) -> None:
    """Raises ConfigError for a file whose weights are not those of its checksum, if it has one. It
    reads one weight at a time.
    """
    with safetensors.safe_open(path, "pt") as file:
        expected = (file.metadata() or {}).get(CHECKSUM)
        if expected is None:
            return
        names = sorted(file.offset_keys())
        if _checksum((name, file.get_tensor(name)) for name in names) != expected:
            raise _damaged(path)


def _damaged(path: Path) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is damaged: its weights are not those that were saved (checksum {CHECKSUM})"
    )


def _pickle_format(data: bytes) -> str | None:
    """Which file of `PICKLES` these bytes begin, or None."""
    for beginning, description in PICKLES.items():
        if data.startswith(beginning):
            return description
    return None


def safetensors_bytes(weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file, the same for the same weights and metadata. The library
    itself writes metadata in random order.

    The header is 8 bytes of length and then JSON, padded with spaces. Offsets count from its end.
    """
    data = safetensors.torch.save(dict(weights), dict(metadata))
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:end])
    sorted_metadata = dict(sorted(tensors.pop("__metadata__").items()))
    header = {"__metadata__": sorted_metadata, **tensors}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text + b" " * (-len(text) % 8)
    return b"".join((len(padded).to_bytes(8, "little"), padded, memoryview(data)[end:]))


def sha256_of(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, types, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for piece in _pieces(sorted(weights.items())):
        digest.update(piece)
    return digest.hexdigest()


def _checksum(weights: Iterable[tuple[str, Tensor]]) -> str:
    """CRC-32 of the same, of weights in the order of their names."""
    crc = 0
    for piece in _pieces(weights):
        crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


def _pieces(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Any]:
    """The pieces that are hashed: bytes and views of memory."""
    for name, weight in weights:
        yield f"{name} {weight.dtype} {tuple(weight.shape)}".encode()
        yield weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
