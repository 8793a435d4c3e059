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
from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.diagnosis.treatment import LARGER, PROVED, TREATED, size_of_neighbours
from ctrans.interop.checkpoint_weights import checkpoint_weights
from ctrans.interop.hugging_face_files import weight_files
from ctrans.model.checkpoint import find_model
from ctrans.model.sums import STATE, SUMS
from ctrans.model.weights_file import write_weights
from solvers import ConfigError

BEFORE = "before-treatment.safetensors.old"
"""The weights of before, under a name by which no library reads them with the others."""
ACTS = "treated.json"
"""What was done to which weight, and why."""
OF_A_RUN = shutil.ignore_patterns(SUMS, STATE, "optim*")
"""Files of a training that do not fit other weights: its sums, its state and its optimiser."""


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
        _write(source, out, factors, acts)
        lines = [f"in {out}, {act['weight']} is {act['words']}" for act in acts]
    else:
        lines = [
            f"nothing was changed: that needs {TREATED!r}, and a weight {LARGER:g} times as large"
            " as in other blocks"
        ]
    untreated = [name for name in failed_checks if name != TREATED]
    if untreated:
        lines.append(f"no treatment is proven for {', '.join(untreated)}")
    return lines


def _write(source: Path, out: Path, factors: Mapping[str, float], acts: Sequence[object]) -> None:
    """Writes the copy whole or not at all. Weights without a factor keep their bits. Raises
    ConfigError if it cannot.
    """
    before: dict[str, Tensor] = {}
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            copy = Path(folder) / out.name
            shutil.copytree(source, copy, ignore=OF_A_RUN)
            copy.chmod(copy.stat().st_mode | 0o700)  # the model's may be read-only
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
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(out)!r}: {error.strerror or error}; choose another place"
        ) from None
