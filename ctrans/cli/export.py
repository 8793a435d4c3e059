"""`ctrans export`."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ctrans.base.option import REQUIRED, option
from ctrans.cli.click_options import once
from ctrans.cli.ending import check_outputs, end
from ctrans.cli.request import Request, command_of
from ctrans.interop.hugging_face_files import sharded_files
from ctrans.interop.nanogpt import CHECKPOINT, to_nanogpt
from ctrans.interop.transformers_export import target_of, write_transformers
from ctrans.measure.measured import Answer, Measured
from ctrans.model.checkpoint import load, load_config
from ctrans.model.gpt import GPT
from ctrans.report.files import write_atomic
from ctrans.report.ownership import SHA256, sha256_of_files
from ctrans.training.run_directory import RunDirectory
from solvers import ConfigError


def _to_nanogpt(model: GPT, directory: Path) -> str:
    data = io.BytesIO()
    torch.save(to_nanogpt(model), data)
    write_atomic(directory / CHECKPOINT, data.getvalue())
    return "nanoGPT"


FORMATS: dict[str, Callable[[GPT, Path], str]] = {"hf": write_transformers, "nanogpt": _to_nanogpt}
"""Formats by name: each function writes a model to a directory and returns its family's name."""


FORMAT_FILES = {"hf": ("config.json", "model.safetensors"), "nanogpt": (CHECKPOINT,)}
"""The files of an exported model, by format."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportRequest(Request):
    """The request of `export`."""

    checkpoint: Path | None = option(
        None,
        "Directory of a model that ctrans saved, or of a training run: its best model, else its"
        " last.",
        multiple=True,
        callback=once,
    )
    form: str = option(
        "hf",
        "hf: config.json and model.safetensors, as AutoModelForCausalLM.from_pretrained reads them."
        " nanogpt: ckpt.pt.",
        flags="--to",
        choices=FORMATS,
    )
    out: Path = option(REQUIRED, "The directory to write.", group="Output")


@command_of(ExportRequest, "export")
def command(request: ExportRequest) -> None:
    """Write a model that ctrans saved in the format of another library.

    Hugging Face has two families that fit. Pre-LN blocks with RMSNorm, rotary positions, SwiGLU and
    no bias become Llama, or Granite if dt is not 1 (its residual multiplier is dt). Pre-LN blocks
    with LayerNorm, learned positions, GELU and bias become GPT-2. For any other choice ctrans
    raises an error that names it. ctrans replaces only an earlier export, unless you give
    --overwrite. The directory also gets export.json, with the SHA-256 of the files: if another
    program has changed one, as a fine-tuning does, the file stays. An export that was killed has no
    config.json, so that no library reads it as a model, and `ctrans diagnose --weights-only` says
    so.

    \b
    ctrans train --placement pre --norm rmsnorm --positions rotary --ffn swiglu --no-bias --out run
    ctrans export --checkpoint run --out models/llama
    ctrans screen --model models/llama --quick
    """
    write = FORMATS[request.form]
    if request.checkpoint is None:
        raise ConfigError(
            "no model is named: give --checkpoint, a directory that ctrans saved or a training run"
        )
    if RunDirectory(request.out).exists:
        raise ConfigError(
            f"{str(request.out)!r} has a training run, and commands would read the exported model"
            " in its place: choose another --out"
        )
    files = FORMAT_FILES[request.form]
    check_outputs(request, request.out, files)
    if os.path.realpath(request.out) == os.path.realpath(request.checkpoint):
        raise ConfigError(
            f"{str(request.out)!r} has the model that this command reads: choose another --out"
        )
    others = _files_of_other_formats(request)
    if others and not request.overwrite:
        raise ConfigError(
            f"{str(request.out)!r} has {others[0]}, a model in another format, which commands may"
            " read in place of this one: choose another --out, or add --overwrite"
        )
    replaced: list[str] = []
    if request.form == "hf":
        replaced = [path.name for path in sharded_files(request.out)]
    if replaced and not request.overwrite:
        raise ConfigError(
            f"{str(request.out)!r} has {replaced[0]} of a sharded model, which this one would"
            " replace: choose another --out, or add --overwrite"
        )
    if request.form == "hf":
        target_of(load_config(request.checkpoint))
    family = write(load(request.checkpoint), request.out)
    notes = [f"Files: {', '.join(files)}"]
    if replaced:
        notes.append(f"Removed {len(replaced)} files of the sharded model that was there")
    if others:
        notes.append(f"{', '.join(others)} of another format stays there, with its own model")
    answer = Answer(f"Wrote the model as {family} to {request.out}.", "good")
    end(
        request,
        request.out,
        result={
            "family": family,
            "directory": str(request.out),
            "files": files,
            SHA256: sha256_of_files(request.out, files),
        },
        measured=Measured(answers=(answer,), notes={"": notes}),
    )


def _files_of_other_formats(request: ExportRequest) -> list[str]:
    """The names of a model's files in --out that this format does not write."""
    own = FORMAT_FILES[request.form]
    names = [name for files in FORMAT_FILES.values() for name in files if name not in own]
    return [name for name in names if os.path.lexists(request.out / name)]
