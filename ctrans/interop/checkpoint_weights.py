"""The weights of a checkpoint by name, each read when it is asked for, without a model; and a
treated copy of its directory.

It reads a Hugging Face directory, a directory or run of ctrans, a file of safetensors, a
distributed checkpoint, and a pickle of weights if that is allowed. It copies a directory with
safetensors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import safetensors
from torch import Tensor

from ctrans.given_files import read_json
from ctrans.interop.distributed_checkpoint import METADATA, distributed_weights, gains_less_one
from ctrans.interop.hugging_face import CONFIG, NO_WEIGHTS, directory_weights, weight_files
from ctrans.interop.pickled import pickled_weights
from ctrans.interop.streamed import CODES, FLOATS, Stored, read_weight, stored_weights
from ctrans.model.checkpoint import BEST, LAST, find_model
from ctrans.model.sums import STATE, SUMS
from ctrans.model.weights_file import flush, write_durably, write_weights
from ctrans.stability.diagnosis.diagnose import Diagnosis
from ctrans.stability.diagnosis.treatment import LARGER, PROVED, TREATED, size_of_neighbours
from ctrans.stability.diagnosis.weights_only import GAIN
from solvers import ConfigError

SAFETENSORS, PICKLED = ".safetensors", (".bin", ".pt", ".pth")
BLOCK = 128
"""Rows and columns that share a scale of fp8."""
PACKED = re.compile(r"(qweight|qzeros|weight_packed|weight_shape|_blocks|quant_map|absmax|quant_state\S*|zero_point)$")
"""Names of codes that several formats pack in ways of their own."""
ONE_PLUS = re.compile(r"gemma[23]?(_text)?|recurrent_gemma|t5gemma2?|vaultgemma|nemotron|qwen3_(next|5)\w*")
"""Families that store a norm's gain less 1."""
BEFORE, ACTS = "before-treatment.safetensors.old", "treated.json"
"""The weights of before, under a name by which no library reads them with the others; and the acts."""
OF_A_RUN = shutil.ignore_patterns(SUMS, STATE, "optim*")
"""Files of a training that do not fit other weights: its sums, its state and its optimiser."""


def checkpoint_weights(path: Path, *, allow_pickle: bool = False) -> dict[str, Callable[[], Tensor]]:
    """By name, a function that reads the weight.

    Codes of fp8 and of 8 bits with scales become numbers. Gains that a family stores less 1 become
    gains. Raises ConfigError for a path without weights, and for other quantised weights.
    """
    stored = {name: weight for name, weight in _stored(path, allow_pickle).items() if not re.search("|".join(NO_WEIGHTS), name)}
    less_one = gains_less_one(path) if os.path.isfile(path / METADATA) else ONE_PLUS.fullmatch(_family(path))
    found: dict[str, Callable[[], Tensor]] = {}
    for name, weight in stored.items():
        if PACKED.search(name):
            raise ConfigError(
                f"{str(weight.path)!r} holds {name}, codes of a quantisation that ctrans does not read: save it unquantised"
            )
        if weight.dtype in CODES:
            found[name] = _dequantised(name, weight, stored)
        elif weight.dtype in FLOATS:
            one_plus = less_one and GAIN.search(name) and "linear_attn" not in name
            found[name] = partial(_one_plus, weight) if one_plus else partial(read_weight, weight)
        elif name.endswith("weight"):
            raise ConfigError(
                f"{str(weight.path)!r} holds {name} as {weight.dtype}, and ctrans reads {', '.join(FLOATS | CODES)}: save it so"
            )
    scales = {each for name, weight in stored.items() if weight.dtype in CODES for each in _scales_of(name)}
    return {name: read for name, read in found.items() if name not in scales}


def _scales_of(name: str) -> list[str]:
    """Names of what multiplies the codes of a weight, as fp8 models, compressed-tensors and
    bitsandbytes store it.
    """
    return [f"{name}_scale_inv", f"{name}_scale", re.sub(r"weight$", "SCB", name)]


def _stored(path: Path, allow_pickle: bool) -> Mapping[str, Stored]:
    if os.path.isfile(path) and path.suffix == SAFETENSORS:
        return stored_weights([path])
    if os.path.isfile(path) and path.suffix in PICKLED:
        if not allow_pickle:
            raise ConfigError(f"{str(path)!r} is a pickle and is not read: give safetensors, or allow it (--allow-pickle)")
        return pickled_weights(path)
    if os.path.isfile(path / METADATA):
        return distributed_weights(path)
    if os.path.isdir(path):
        run = os.path.lexists(path / BEST) or os.path.lexists(path / LAST)
        return directory_weights(find_model(path) if run else path, allow_pickle)
    raise ConfigError(
        f"{str(path)!r} holds no weights: give a directory of Hugging Face or ctrans, a distributed checkpoint, or a {SAFETENSORS} file"
    )


def _family(path: Path) -> str:
    """The family in the config next to the weights; empty if there is none."""
    config = (path if os.path.isdir(path) else path.parent) / CONFIG
    said = read_json(config) if os.path.isfile(config) else None
    return str(said.get("model_type", "")) if isinstance(said, dict) else ""


def _one_plus(weight: Stored) -> Tensor:
    return 1 + read_weight(weight).float()


def _dequantised(name: str, codes: Stored, stored: Mapping[str, Stored]) -> Callable[[], Tensor]:
    """A function that multiplies the codes by their scales. Raises ConfigError for scales that are
    missing or do not fit.
    """
    scale = next((stored[each] for each in _scales_of(name) if each in stored), None)
    if scale is None and codes.dtype == "I8":
        raise ConfigError(f"{str(codes.path)!r} holds {name} as I8 without scales: save it unquantised")
    if scale is None:
        return partial(read_weight, codes)
    rows, columns = (*codes.shape, 1, 1)[:2]
    many = scale.shape
    if many in ((), (1,), (rows,), (rows, 1)):
        block = 1, columns
    elif len(many) == 2 and many == (-(-rows // BLOCK), -(-columns // BLOCK)):
        block = BLOCK, BLOCK
    elif len(many) == 2 and many[0] == rows and columns % many[1] == 0:
        block = 1, columns // many[1]
    else:
        raise ConfigError(
            f"{str(codes.path)!r} holds {name} {codes.shape} with scales {many}, which do not fit: save it unquantised"
        )
    return partial(_multiplied, codes, scale, block, 127.0 if scale.name.endswith("SCB") else 1.0)


def _multiplied(codes: Stored, scale: Stored, block: tuple[int, int], unit: float) -> Tensor:
    factors = read_weight(scale).float() / unit
    if factors.dim() == 1 and factors.numel() > 1:
        factors = factors.unsqueeze(1)
    numbers = read_weight(codes).float()
    if factors.dim() == 2 and factors.numel() > 1:
        factors = factors.repeat_interleave(block[0], 0)[: len(numbers)].repeat_interleave(block[1], 1)[:, : numbers.shape[1]]
    return numbers.mul_(factors)


def to_treat(named: Sequence[tuple[str, str | Path]], out: Path | None) -> Path | None:
    """The directory of the one model that --treat copies. Raises ConfigError for other models, and if
    the copy has no new place.
    """
    if out is None:
        return None
    kinds = [f"--{option}" for option, _ in named]
    if kinds not in (["--model"], ["--checkpoint"]):
        raise ConfigError(
            f"--treat copies one directory with safetensors, and you named {', '.join(kinds) or 'none'}: give it as MODEL"
        )
    source = find_model(named[0][1])
    for name in weight_files(source):
        if not os.path.isfile(source / name):
            raise ConfigError(f"--treat copies safetensors, and {str(source)!r} has no {name}: save the model in that format")
    if os.path.lexists(out) or source in out.resolve().parents:
        raise ConfigError(f"--treat {str(out)!r} exists, or is in the model's directory: choose a new directory")
    return source


def treat(source: Path | None, out: Path | None, results: Mapping[str, Diagnosis]) -> list[str]:
    """Writes the copy if there is something to treat. Returns lines that say what was changed and what
    was not.
    """
    if source is None or out is None:
        return []
    found = dict.fromkeys(finding.check for each in results.values() for finding in each.findings)
    factors = size_of_neighbours(checkpoint_weights(source)) if TREATED in found else {}
    acts = [
        {
            "weight": name,
            "factor": factor,
            "words": f"multiplied by {factor:.3g}, to the size in other blocks",
            "finding": TREATED,
            "proved": PROVED,
        }
        for name, factor in factors.items()
    ]
    if acts:
        _write(source, out, factors, acts)
    lines = [f"in {out}, {act['weight']} is {act['words']}" for act in acts] or [
        f"nothing was changed: that needs {TREATED!r}, and a weight {LARGER:g} times as large as in other blocks"
    ]
    if others := ", ".join(name for name in found if name != TREATED):
        lines.append(f"no treatment is proven for {others}")
    return lines


def _write(source: Path, out: Path, factors: Mapping[str, float], acts: Sequence[object]) -> None:
    """Writes the copy whole or not at all. Weights without a factor keep their bits. Raises ConfigError
    if it cannot.
    """
    before: dict[str, Tensor] = {}
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
            made = Path(place) / out.name
            shutil.copytree(source, made, ignore=OF_A_RUN)
            made.chmod(made.stat().st_mode | 0o700)  # the model's may be read-only
            for name in weight_files(source):
                with safetensors.safe_open(source / name, "pt") as file:
                    weights = {each: file.get_tensor(each) for each in file.offset_keys()}
                    if own := {each: weights[each] for each in factors if each in weights}:
                        before |= own
                        weights |= {each: weight * factors[each] for each, weight in own.items()}
                        write_weights(made / name, weights, file.metadata() or {})
            write_weights(made / BEFORE, before, {})
            write_durably(made / ACTS, json.dumps(acts, indent=1).encode())
            for path in (*made.rglob("*"), made):
                flush(path)
            os.rename(made, out)
            flush(out.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {str(out)!r}: {error.strerror or error}; choose another place") from None
