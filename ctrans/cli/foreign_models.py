"""Models of other libraries that a command runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.cli.model_request import ModelRequest, get_dtype
from ctrans.cli.model_sources import ModelSource, check_alone, needs_images
from ctrans.cli.plugins import called, function_of
from ctrans.dynamics.depth import check_dt
from ctrans.interop import Opened, open_model
from ctrans.interop.anatomy import read_anatomy
from ctrans.interop.architecture import from_architecture, skeleton
from ctrans.interop.example_inputs import Example
from ctrans.interop.families import READS
from ctrans.interop.image_inputs import read_images
from ctrans.interop.loss_names import Loss
from ctrans.interop.opened import open_imported
from ctrans.interop.presets import PRESETS
from ctrans.interop.transformers_library import quiet
from solvers import ConfigError


def _of_files(request: ModelRequest, path: Path) -> ModelSource:
    """A checkpoint of another library."""
    check_alone("--model", request, but=("context", "dt", "heads"))
    heads = None
    if "heads" in request.typed:
        heads = request.config["heads"]
    opened = open_model(
        path,
        get_dtype(request.dtype),
        dt=check_dt(request.config["dt"]),
        on_demand=request.stream,
        loss=_loss(request),
        heads=heads,
        images=request.images is not None,
        allow_pickle=request.allow_pickle,
        **_named_parts(request),
    )
    return _of_opened(opened, request, path.name, trained=True)


def _of_python(request: ModelRequest, function: str) -> ModelSource:
    """The module that a function of the user returns."""
    check_alone("--python", request, but=("context", "dt"))
    if request.stream:
        raise ConfigError(f"{function!r} returns a model with all its weights: leave out --stream")
    function_of(function)
    parts = _named_parts(request)
    loss = _loss(request)
    example: Example | None = None
    batch = None
    if request.example is not None:  # first, since a model may take long
        example, batch = _example(request.example)
    module = called(function)
    dtype = get_dtype(request.dtype)
    if isinstance(module, Opened):
        raise ConfigError(
            f"{function!r} returns a model that open_model made: return the module itself"
        )
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{function!r} returned {type(module).__name__}: return an nn.Module")
    if example is None and request.images is not None and not _is_of_transformers(module):
        if request.images.suffix != ".npy":
            raise ConfigError(
                f"the module of {function!r} does not state its image size: give --images an .npy"
                " array of images"
            )
        example = torch.from_numpy(read_images(request.images)[:2].copy()).to(dtype)
    if request.example is not None and batch is not None:
        _check_ids(request.example, batch[0], module)
    opened = open_model(
        module.to(dtype),
        dtype,
        dt=check_dt(request.config["dt"]),
        loss=loss,
        example=example,
        **parts,
    )
    return _of_opened(opened, request, Path(function).name, trained=True, example=batch)


def _check_ids(example: str, rows: Tensor, module: nn.Module) -> None:
    """Raises ConfigError for a token id of the example that no embedding of the module has."""
    sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    if not sizes or rows.dtype not in (torch.int32, torch.int64) or rows.numel() == 0:
        return
    largest = int(rows.max())
    if largest >= max(sizes):
        raise ConfigError(
            f"{example!r} returns the token id {largest}, and the model's vocabulary runs from 0 to"
            f" {max(sizes) - 1}: give tokens of this model"
        )


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether its config states its kind, and so the size of its images."""
    return hasattr(getattr(module, "config", None), "model_type")


def _loss(request: ModelRequest) -> str | Loss | None:
    """The name of the loss, or the user's function."""
    if request.loss is not None and ":" in request.loss:
        return function_of(request.loss)
    return request.loss


def _example(value: str) -> tuple[Example, tuple[Tensor, Tensor | None]]:
    """The model's input that the user's function returns; and the rows and targets of its batch."""
    example = called(value)
    targets = None
    if isinstance(example, tuple) and len(example) == 2:
        example, targets = example
    arguments = example
    if isinstance(example, Mapping) and len(example) == 1:
        argument = next(iter(example.values()))
        if isinstance(argument, Mapping):  # the forward's one argument may be a mapping
            arguments = argument
    if isinstance(arguments, Mapping):
        rows = next(iter(arguments.values()), None)
    else:
        rows = arguments
    if not isinstance(rows, Tensor) or not (targets is None or isinstance(targets, Tensor)):
        returned = f"a {type(rows).__name__}"
        if targets is not None:
            returned += f" and a {type(targets).__name__}"
        raise ConfigError(
            f"{value!r} returns {returned}: return a tensor, or a mapping of the forward's keyword"
            " arguments with a tensor first; or a pair of one of them and a tensor of targets"
        )
    if targets is not None and targets.shape[:1] != rows.shape[:1]:
        raise ConfigError(
            f"{value!r} returns {len(rows)} rows and targets {tuple(targets.shape)}: give as many"
            " targets"
        )
    return example, (rows, targets)


def _named_parts(request: ModelRequest) -> dict[str, Any]:
    """The parts that the file of --anatomy names, as keywords of `open_model`."""
    if request.anatomy is None:
        return {}
    return vars(read_anatomy(request.anatomy))


def _of_architecture(request: ModelRequest, name: str) -> ModelSource:
    """A published shape, or that of a config.json, with fresh weights."""
    check_alone("--architecture", request, but=("context", "dt", "depth", "seed"))
    with quiet():
        if request.images is None:  # before images of any size pass
            outline = skeleton(name)
            if READS.get(getattr(outline, "main_input_name", "")) == "images":
                raise needs_images(type(outline).__name__)
        blocks = None
        if "depth" in request.typed:
            blocks = request.config["depth"]
        dt = check_dt(request.config["dt"])
        dtype = get_dtype(request.dtype)
        anatomy = None
        if request.anatomy is not None:
            anatomy = read_anatomy(request.anatomy)
        model = from_architecture(
            name,
            seed=request.seed,
            blocks=blocks,
            dt=dt,
            dtype=dtype,
            on_demand=request.stream,
            anatomy=anatomy,
        )
    path = Path(name)
    if name in PRESETS:
        directory = None
    elif path.is_dir():
        directory = path
    else:
        directory = path.parent
    opened = open_imported(model, directory, _loss(request))
    return _of_opened(opened, request, path.name)


def _of_opened(opened: Opened, request: ModelRequest, name: str, **more: Any) -> ModelSource:
    """A model of another library with this name. `more` are further fields of `ModelSource`."""
    config = opened.config
    depth = opened.model.depth
    context = opened.longest(request.context)
    if config.context is None and context < request.context:
        longest = context
    else:
        longest = config.context
    unknown = dict.fromkeys(key for key in request.config if key not in ("context", "dt"))
    placements = dict.fromkeys(sublayer.placement.name for sublayer in depth.sublayers)
    return ModelSource(
        config=config,
        make=lambda: opened.model,
        name=name,
        vocabulary=opened.vocabulary,
        segments=len(depth.sublayers),
        context=context,
        longest=longest,
        placements=tuple(placements),
        resolved={
            **unknown,
            "depth": depth.blocks,
            "width": config.width,
            "norm": config.norm,
            "context": context,
        },
        opened=opened,
        streamed=depth.streamed,
        **more,
    )


FOREIGN_SOURCES: dict[str, Callable[[ModelRequest, Any], ModelSource]] = {
    "model": _of_files,
    "architecture": _of_architecture,
    "python": _of_python,
}
"""How to find a model of another library, by the option that names it."""
