"""The weights of a checkpoint by name, each read when it is asked for, without a model.

It reads a Hugging Face directory, a directory or run of ctrans, a file of safetensors, a
distributed checkpoint, and a pickle of weights if that is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ctrans.base.given_files import read_json
from ctrans.interop.distributed_checkpoint import METADATA, distributed_weights, gains_less_one
from ctrans.interop.hugging_face_files import CONFIG, NO_WEIGHTS, directory_weights
from ctrans.interop.nanogpt import CHECKPOINT
from ctrans.interop.packed_codes import check_method, check_no_codes, is_table
from ctrans.interop.pickled import pickled_weights
from ctrans.interop.scaled_codes import (
    BLOCK,
    block_of,
    check_none_missing,
    check_scales,
    dequantised,
    scales_of,
)
from ctrans.interop.stored_weights import (
    CODES,
    COMPLEX,
    FLOATS,
    Stored,
    read_weight,
    stored_weights,
)
from ctrans.interop.training_state import without_state
from ctrans.interop.weight_names import GAIN
from ctrans.interop.weights_in_objects import say_left_out
from ctrans.model.checkpoint import BEST, LAST, find_model, of_ours
from ctrans.model.sums import STATE, SUMS, check_bound
from ctrans.model.weights_file import check_checksum
from solvers import ConfigError

SAFETENSORS = ".safetensors"
PICKLED = (".bin", ".pt", ".pth")
ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-(?P<files>\d{5})\.\w+$")
"""How the names of shards end."""
LONGEST_AXIS = 1 << 32
"""The most entries along an axis. A weight without numbers fits in any file, and its axes are read
in parts.
"""
NO_WHOLE_NUMBERS = ("F", "float")
"""How the names of dtypes begin that are no whole numbers, with safetensors and with torch."""
PARAMETERS = ("weight", "bias")
"""How names of parameters end."""
TOWERS = r"(^|\.)(vision_tower|vision_model|visual|audio_tower)\."
"""Names in the parts of a family that read images and sound, with norms of their own."""
ONE_PLUS = {
    r"gemma[23]?(_text)?|recurrent_gemma|t5gemma2?|vaultgemma|nemotron": TOWERS,
    r"minimax_m3_vl(_text)?|step3p[57]": TOWERS,
    r"qwen3_next|qwen3_5(_moe)?(_text)?|qwen4_exp(_text)?": rf"{TOWERS}|linear_attn",
    r"muse_(glimmer|spark)(_text)?": rf"{TOWERS}|^(model\.)?(language_model\.)?norm\.",
    r"videoprism\w*": r"$^",
}
"""Families that store a norm's gain less 1, and the names of their gains that are stored whole."""


WeightReaders = Mapping[str, Callable[[], Tensor]]
"""Functions that read the weights, by name."""


@dataclasses.dataclass(frozen=True)
class WeightsAndBuffers:
    """What a checkpoint holds: its weights, and the buffers that are no weights, such as a causal
    mask or a table of rotations, as floating-point or complex numbers.

    `unread` has the dtypes of tensors that are neither, such as a bias of whole numbers. Masks,
    counters and indices of whole numbers are left out.

    `left_out` has the names of what a training keeps next to the weights, such as the state of its
    optimiser. `files` is the number of files of the model of which this is one, by its name.
    """

    weights: WeightReaders
    buffers: WeightReaders
    unread: Mapping[str, str]
    left_out: Sequence[str] = ()
    files: int = 1


def checkpoint_weights(path: Path, *, allow_pickle: bool = False) -> WeightReaders:
    """The weights of `read_checkpoint`."""
    return read_checkpoint(path, allow_pickle=allow_pickle).weights


def read_checkpoint(path: Path, *, allow_pickle: bool = False) -> WeightsAndBuffers:
    """By name, functions that read the weights and the buffers.

    Codes of fp8 and of 8 bits with scales become numbers. Gains that a family stores less 1 become
    gains. Raises ConfigError for a path without weights, for other quantised weights, and for
    damaged files of ctrans.
    """
    files = _stored(path, allow_pickle=allow_pickle)
    _check_whole(files)
    all_stored, left_out = without_state(path, files)
    say_left_out(path, left_out)
    stored: dict[str, Stored] = {}
    buffers: dict[str, Callable[[], Tensor]] = {}
    for name, weight in all_stored.items():
        if not _is_buffer(name, weight):
            stored[name] = weight
        elif (
            weight.dtype in FLOATS.keys() | COMPLEX and max(weight.shape, default=0) <= LONGEST_AXIS
        ):
            buffers[name] = partial(read_weight, weight)
    config_path, config = _config(path)
    where = repr(str(config_path))
    check_method(where, config)
    check_no_codes(stored)
    block = BLOCK
    if any(weight.dtype in CODES for weight in stored.values()):
        block = block_of(where, config)
    less_one = _less_one(path)
    weights: dict[str, Callable[[], Tensor]] = {}
    unread: dict[str, str] = {}
    for name, weight in stored.items():
        if max(weight.shape, default=0) > LONGEST_AXIS:
            raise ConfigError(
                f"{str(weight.path)!r} holds {name} of size {weight.shape}: an axis may have at"
                f" most {LONGEST_AXIS:,} entries"
            )
        if weight.dtype in CODES:
            weights[name] = dequantised(name, weight, stored, block)
        elif weight.dtype in FLOATS:
            if less_one(name):
                weights[name] = partial(_one_plus, weight)
            else:
                weights[name] = partial(read_weight, weight)
        elif name.endswith("weight"):
            raise ConfigError(
                f"{str(weight.path)!r} holds {name} as {weight.dtype}, and ctrans reads"
                f" {', '.join(FLOATS | CODES)}: save it so"
            )
        else:
            unread[name] = weight.dtype
    check_scales(stored)
    check_none_missing(stored, where, config)
    for name, weight in stored.items():
        if weight.dtype in CODES:
            for scale in scales_of(name):
                weights.pop(scale, None)
                unread.pop(scale, None)
    if not weights:
        raise ConfigError(
            f"{str(path)!r} holds no weights in {', '.join(FLOATS | CODES)}: give the files of a"
            " model"
        )
    return WeightsAndBuffers(weights, buffers, unread, left_out, _files_of_model(path))


def _files_of_model(path: Path) -> int:
    """How many files the model has of which this is one, as the name of a shard says; else 1."""
    found = ONE_OF_SEVERAL.search(path.name)
    if found is None or not os.path.isfile(path):
        return 1
    return max(int(found["files"]), 1)


def _is_buffer(name: str, weight: Stored) -> bool:
    """Whether a stored tensor is no weight by its name and dtype."""
    if weight.dtype in COMPLEX:
        return not name.endswith("weight")
    is_buffer = re.search("|".join(NO_WEIGHTS), name) is not None
    if weight.dtype in FLOATS:
        return is_buffer
    # the bias of an attention is a mask, which has two axes or more
    is_vector = name.endswith(".bias") and len(weight.shape) == 1
    is_buffer = is_buffer and not is_vector
    if weight.dtype.startswith(NO_WHOLE_NUMBERS):
        return is_buffer
    is_number = math.prod(weight.shape) == 1 and not name.endswith(PARAMETERS)
    return is_buffer or is_number or is_table(name, weight)


def _stored(path: Path, *, allow_pickle: bool) -> Mapping[str, Stored]:
    if os.path.isfile(path / CHECKPOINT) and not os.path.isfile(path / CONFIG):
        path = path / CHECKPOINT  # of nanoGPT
    if os.path.isfile(path) and path.suffix == SAFETENSORS:
        return stored_weights([path])
    if os.path.isfile(path) and path.suffix in PICKLED:
        if not allow_pickle:
            raise ConfigError(
                f"{str(path)!r} is a pickle and is not read: allow it (--allow-pickle), which runs"
                " no code, or give safetensors"
            )
        return pickled_weights(path)
    if os.path.isfile(path / METADATA):
        return distributed_weights(path)
    if os.path.isdir(path) and next(path.glob("*.distcp"), None) is not None:
        raise ConfigError(
            f"{str(path)!r} lacks {METADATA}, which says where a distributed checkpoint has its"
            " weights: copy it too, or save the checkpoint again"
        )
    if os.path.isdir(path):
        is_run = os.path.lexists(path / BEST) or os.path.lexists(path / LAST)
        if is_run:
            return directory_weights(find_model(path), allow_pickle=allow_pickle)
        return directory_weights(path, allow_pickle=allow_pickle)
    raise ConfigError(
        f"{str(path)!r} holds no weights: give a directory of Hugging Face or ctrans, a distributed"
        f" checkpoint, or a {SAFETENSORS} file"
    )


def _check_whole(stored: Mapping[str, Stored]) -> None:
    """Raises ConfigError for a damaged file that ctrans wrote, and for one in a damaged checkpoint
    of a training run. Files of others have no sums of a kind that ctrans knows.
    """
    files = {weight.path for weight in stored.values() if weight.path.suffix == SAFETENSORS}
    for path in sorted(files):
        is_in_a_run = all(os.path.exists(path.parent / name) for name in (SUMS, STATE))
        if is_in_a_run or of_ours(path):
            check_bound(path.parent)
            check_checksum(path)


def _less_one(path: Path) -> Callable[[str], bool]:
    """Whether a weight of that name is a gain that is stored less 1."""
    whole = None
    if os.path.isfile(path / METADATA):
        if gains_less_one(path):
            whole = "linear_attn"
    else:
        families = _families(path)
        whole = next(
            (
                names
                for pattern, names in ONE_PLUS.items()
                if any(re.fullmatch(pattern, family) for family in families)
            ),
            None,
        )
    if whole is None:
        return lambda name: False
    return lambda name: bool(GAIN.search(name)) and not re.search(whole, name)


def _families(path: Path) -> list[str]:
    """The family in the config next to the weights, and that of its language model."""
    _, config = _config(path)
    configs = [config, config.get("text_config")]
    return [str(part.get("model_type", "")) for part in configs if isinstance(part, dict)]


def _config(path: Path) -> tuple[Path, dict[str, Any]]:
    """The path of the config next to the weights, and its entries; no entries if there is none."""
    if os.path.isdir(path):
        config_path = path / CONFIG
    else:
        config_path = path.parent / CONFIG
    if not os.path.isfile(config_path):
        return config_path, {}
    config = read_json(config_path)
    if not isinstance(config, dict):
        return config_path, {}
    return config_path, config


def _one_plus(weight: Stored) -> Tensor:
    return 1 + read_weight(weight).float()
