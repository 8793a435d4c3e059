"""Inputs of models that read no token ids: images of a folder, or an array of images or audio
features written by `numpy.save`.

Files may come from anyone. Only regular files of bounded size in the formats below are read, and
arrays without pickles.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctrans.base.given_files import check_file, read_array, read_json
from ctrans.base.option import WEIGHT
from ctrans.base.printable import one_line
from ctrans.dynamics.depth import check_count
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from solvers import ConfigError, shown

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}
"""File suffixes of images, and their formats."""
LARGEST_FILE = 64 << 20
"""The largest number of bytes of an image."""
MOST_PIXELS = 64_000_000
"""The largest number of pixels of an image."""
MOST_FILES = 100_000
"""The largest number of entries of a folder."""
PREPARED = "preprocessor_config.json"
"""The file of a directory with the mean and deviation by which images were normalised."""
HALF = 0.5
"""Mean and deviation without such a file."""


@dataclasses.dataclass(frozen=True)
class Images:
    """Images, or other arrays, read in batches of the shape (count, *shape)."""

    path: Path
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    dtype: torch.dtype

    def batch(self, count: int) -> Tensor:
        """`count` of them, evenly spaced. Raises ConfigError if there are too few, or if one cannot
        be read or has another shape.
        """
        if self.path.suffix == ".npy":
            return self._of_array(count)
        return self._of_files(count)

    @property
    def count(self) -> int:
        """How many there are. Errors as `batch`."""
        if self.path.suffix == ".npy":
            return len(read_images(self.path))
        return len(image_files(self.path))

    @property
    def description(self) -> str:
        """A description in words."""
        if self.path.suffix == ".npy":
            return f"array of {self.path}"
        return f"images of {self.path}"

    def _of_array(self, count: int) -> Tensor:
        images = read_images(self.path)
        if images.shape[1:] != self.shape:
            raise ConfigError(
                f"{str(self.path)!r} has shape {images.shape}, but the model reads (count,"
                f" {', '.join(map(str, self.shape))})"
            )
        chosen = images[spread(len(images), count, self.path)]
        x = torch.from_numpy(np.ascontiguousarray(chosen))
        if not x.is_floating_point():
            return self._scaled(x)
        if not x.isfinite().all():
            raise ConfigError(f"{str(self.path)!r} holds numbers that are not finite")
        return x.to(self.dtype)

    def _of_files(self, count: int) -> Tensor:
        if len(self.shape) != 3:
            raise ConfigError(
                f"{str(self.path)!r}: the model reads arrays {self.shape} and not images: give an"
                " .npy file of them"
            )
        files = image_files(self.path)
        images = [self._image(files[i]) for i in spread(len(files), count, self.path)]
        return self._scaled(torch.stack(images))

    def _image(self, path: Path) -> Tensor:
        """An image resized to the model's size, as bytes (channels, height, width)."""
        from PIL import Image  # a dependency of matplotlib

        size = check_file(path)
        if size > LARGEST_FILE:
            raise ConfigError(
                f"{str(path)!r} has {size:,} bytes: the largest allowed image has {LARGEST_FILE:,}"
            )
        channels, height, width = self.shape
        if channels not in (1, 3):
            raise ConfigError(
                f"the model reads {channels} channels, and image files have 1 or 3: give an .npy"
                " array"
            )
        if channels == 1:
            mode = "L"
        else:
            mode = "RGB"
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                Image.open(path, formats=tuple(set(FORMATS.values()))) as image,
            ):
                if image.width * image.height > MOST_PIXELS:
                    raise ConfigError(
                        f"{str(path)!r} is {image.width} x {image.height}: the largest allowed"
                        f" image has {MOST_PIXELS:,} pixels"
                    )
                small = image.convert(mode).resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(small).reshape(height, width, channels)
        except ConfigError:
            raise
        except FOREIGN_ERRORS as error:
            raise ConfigError(f"{str(path)!r} is no complete image: {one_line(error)}") from None
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    def _scaled(self, x: Tensor) -> Tensor:
        """(x/255 - mean)/deviation for each channel."""
        shape = (-1, *(1,) * (x.dim() - 2))
        mean = torch.tensor(self.mean, dtype=self.dtype).view(shape)
        deviation = torch.tensor(self.deviation, dtype=self.dtype).view(shape)
        return (x.to(self.dtype) / 255 - mean) / deviation


def images_for(
    path: Path, shape: Sequence[int], dtype: torch.dtype, directory: Path | None = None
) -> Images:
    """The images at `path`, each of that shape, normalised as the model in `directory` expects.
    Raises ConfigError for damaged settings.
    """
    entries: Any = {}
    if directory is not None and (directory / PREPARED).exists():
        entries = read_json(directory / PREPARED)
        if not isinstance(entries, dict):
            raise ConfigError(f"{str(directory / PREPARED)!r} must hold a JSON object")
    mean = _by_channel(entries, "image_mean", shape[0], directory)
    deviation = _by_channel(entries, "image_std", shape[0], directory)
    return Images(path, tuple(shape), mean, deviation, dtype)


def _by_channel(
    entries: dict[str, Any], name: str, channels: int, directory: Path | None
) -> tuple[float, ...]:
    """The entry of that name, a number for each channel."""
    entry = entries.get(name)
    if entry is None:
        return (HALF,) * channels
    if isinstance(entry, (int, float)):
        numbers = [entry] * channels
    else:
        numbers = entry
    advice = f"give {channels} finite numbers"
    fits = isinstance(numbers, list) and len(numbers) == channels and all(map(_is_level, numbers))
    if name == "image_std":
        advice += " above 0"
        fits = fits and min(numbers) > 0
    if not fits:
        raise ConfigError(
            f"{str(Path(directory or '') / PREPARED)!r} says {name} = {shown(entry)}: {advice}"
        )
    return tuple(map(float, numbers))


def _is_level(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) < WEIGHT.high


def read_images(path: Path) -> Any:
    """An array of numbers with at least two axes, memory-mapped. Errors as `read_array`."""

    def fits(images: np.ndarray) -> bool:
        return images.ndim > 1 and (images.dtype == np.uint8 or images.dtype.kind == "f")

    return read_array(path, fits, "bytes (uint8) or floats whose first axis counts the images")


def image_files(path: Path) -> list[Path]:
    """The images of a folder, sorted by name, or the one file. Raises ConfigError if there is
    none.
    """
    if path.is_dir():
        entries = []
        for entry in path.iterdir():
            entries.append(entry)
            if len(entries) > MOST_FILES:
                raise ConfigError(
                    f"{str(path)!r} has more than {MOST_FILES:,} entries: give a smaller folder"
                )
        files = sorted(entry for entry in entries if entry.suffix.lower() in FORMATS)
        if not files:
            raise ConfigError(
                f"{str(path)!r} has no images: give files that end in {', '.join(FORMATS)}"
            )
        return files
    check_file(path)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"{str(path)!r} is no image: give a folder of files that end in {', '.join(FORMATS)},"
            " or an .npy array"
        )
    return [path]


def spread(total: int, count: int, path: Path) -> list[int]:
    """`count` evenly spaced indices below `total`. Raises ConfigError if there are fewer."""
    if total < check_count("batch", count):
        if total == 1:
            images = "1 image"
        else:
            images = f"{total} images"
        raise ConfigError(
            f"{str(path)!r} holds {images}, but {count} are needed: give more, or lower --batch"
        )
    return [i * total // count for i in range(count)]
