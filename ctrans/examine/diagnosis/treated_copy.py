"""A treated copy of a model's directory: `ctrans diagnose --treat`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors
from torch import Tensor

from ctrans.base.durable_files import flush, write_durably
from ctrans.base.printable import printable
from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.diagnosis.treatment import LARGER, PROVED, TREATED, size_of_neighbours
from ctrans.interop.checkpoint_weights import checkpoint_weights
from ctrans.interop.hugging_face_files import weight_files
from ctrans.model.checkpoint import find_model
from ctrans.model.sums import OPTIMISER, SHARDS, STATE, SUMS
from ctrans.model.weights_file import write_weights
from solvers import ConfigError

BEFORE = "before-treatment.safetensors.old"
"""The weights of before, under a name by which no library reads them with the others."""
ACTS = "treated.json"
"""What was done to which weight, and why."""
OF_A_RUN = (
    SUMS,
    STATE,
    OPTIMISER,
    SHARDS,
    "optimizer.pt",
    "optimizer.bin",
    "optimizer.safetensors",
)
"""Files of a training that do not fit other weights: its sums, its state and its optimiser, as
ctrans and transformers name them.
"""
LARGEST = 64 << 20
"""The largest size in bytes of a file that is copied next to the weights, such as a tokenizer."""
BLOBS = "blobs"
"""The directory beside a hub's snapshots that holds the files which these link to."""


def to_treat(named: Sequence[tuple[str, str | Path]], out: Path | None) -> Path | None:
    """The directory of the one model that --treat copies. Raises ConfigError for other models, and
    if the copy has no new place.
    """
    if out is None:
        return None
    kinds = [f"--{option}" for option, _ in named]
    if kinds not in (["--model"], ["--checkpoint"]):
        raise ConfigError(
            "--treat copies one directory with safetensors, and you named"
            f" {', '.join(kinds) or 'none'}: give it as MODEL"
        )
    source = find_model(named[0][1])
    for name in weight_files(source):
        if not os.path.isfile(source / name):
            raise ConfigError(
                f"--treat copies safetensors, and {str(source)!r} has no {name}: save the model in"
                " that format"
            )
    if os.path.lexists(out) or source in out.resolve().parents:
        raise ConfigError(
            f"--treat {str(out)!r} exists, or is in the model's directory: choose a new directory"
        )
    return source


def treat(source: Path | None, out: Path | None, results: Mapping[str, Diagnosis]) -> list[str]:
    """Writes the copy if there is something to treat. Returns lines that say what was changed and
    what was not.
    """
    if source is None or out is None:
        return []
    failed_checks = dict.fromkeys(
        finding.check for diagnosis in results.values() for finding in diagnosis.findings
    )
    factors: dict[str, float] = {}
    if TREATED in failed_checks:
        factors = size_of_neighbours(checkpoint_weights(source))
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
        left_out = _write(source, out, factors, acts)
        lines = [f"in {out}, {act['weight']} is {act['words']}" for act in acts]
        lines += [f"{printable(name)} was not copied: {why}" for name, why in left_out.items()]
    else:
        lines = [
            f"nothing was changed: that needs {TREATED!r}, and a weight {LARGER:g} times as large"
            " as in other blocks"
        ]
    untreated = [name for name in failed_checks if name != TREATED]
    if untreated:
        lines.append(f"no treatment is proven for {', '.join(untreated)}")
    return lines


def _write(
    source: Path, out: Path, factors: Mapping[str, float], acts: Sequence[object]
) -> dict[str, str]:
    """Writes the copy whole or not at all. Weights without a factor keep their bits. Returns the
    names in the model's directory that were not copied, each with the reason. Raises ConfigError if
    it cannot.
    """
    before: dict[str, Tensor] = {}
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            copy = Path(folder) / out.name
            copy.mkdir()
            left_out = _copy_model(source, copy)
            for name in weight_files(source):
                with safetensors.safe_open(source / name, "pt") as file:
                    weights = {key: file.get_tensor(key) for key in file.offset_keys()}
                    treated = [key for key in factors if key in weights]
                    if not treated:
                        continue
                    for key in treated:
                        before[key] = weights[key]
                        weights[key] = before[key] * factors[key]
                    write_weights(copy / name, weights, file.metadata() or {})
            write_weights(copy / BEFORE, before, {})
            write_durably(copy / ACTS, json.dumps(acts, indent=1).encode())
            for path in (*copy.rglob("*"), copy):
                flush(path)
            os.rename(copy, out)
            flush(out.parent)
            return left_out
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(out)!r}: {error.strerror or error}; choose another place"
        ) from None


def _copy_model(source: Path, copy: Path) -> dict[str, str]:
    """Copies the weights, and the small regular files next to them, such as the config and the
    tokenizer. Returns the other names, with why they stayed behind.
    """
    left_out: dict[str, str] = {}
    weights = set(weight_files(source))
    for path in sorted(source.iterdir()):
        if path.name in OF_A_RUN:
            left_out[path.name] = "it is of a training, and does not fit other weights"
            continue
        if path.name in (BEFORE, ACTS):
            left_out[path.name] = "the copy has its own file of this name"
            continue
        if path.name not in weights:
            reason = _why_not(path, source)
            if reason:
                left_out[path.name] = reason
                continue
        shutil.copyfile(path, copy / path.name)
    return left_out


def _why_not(path: Path, source: Path) -> str:
    """Why a file next to the weights is not copied; "" if it is."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return "its link leads nowhere"
    own = source.resolve()
    homes = (own, own.parent.parent / BLOBS)
    if path.is_symlink() and target.parent not in homes:
        return "it is a link to another directory"
    if not target.is_file():
        return "it is no regular file"
    if target.stat().st_size > LARGEST:
        return f"it has more than {LARGEST >> 20} MiB"
    return ""
