"""Models of other libraries that a command runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.cli.model_sources import ModelSource, check_alone, needs_images
from ctrans.cli.plugins import called, function_of
from ctrans.cli.request import ModelRequest, get_dtype
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
    opened = open_model(
        path,
        get_dtype(request.dtype),
        dt=check_dt(request.config["dt"]),
        on_demand=request.stream,
        loss=_loss(request),
        heads=request.config["heads"] if "heads" in request.typed else None,
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
    made = called(function)
    dtype = get_dtype(request.dtype)
    if isinstance(made, Opened):
        raise ConfigError(
            f"{function!r} returns a model that open_model made: return the module itself"
        )
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{function!r} returned {type(made).__name__}: return an nn.Module")
    if request.example is None:
        example, given = (None, None)
    else:
        example, given = _example(request.example)
    if (
        example is None
        and request.images is not None
        and not hasattr(getattr(made, "config", None), "model_type")
    ):
        if request.images.suffix != ".npy":
            raise ConfigError(
                f"the module of {function!r} does not state its image size: give --images an .npy"
                " array of images"
            )
        example = torch.from_numpy(read_images(request.images)[:2].copy()).to(dtype)
    opened = open_model(
        made.to(dtype),
        dtype,
        dt=check_dt(request.config["dt"]),
        loss=_loss(request),
        example=example,
        **_named_parts(request),
    )
    return _of_opened(opened, request, Path(function).name, trained=True, given=given)


def _loss(request: ModelRequest) -> str | Loss | None:
    """The name of the loss, or the user's function."""
    if request.loss is not None and ":" in request.loss:
        return function_of(request.loss)
    return request.loss


def _example(value: str) -> tuple[Example, tuple[Tensor, Tensor | None]]:
    """The model's input that the user's function returns; and the rows and targets of its batch."""
    made = called(value)
    if isinstance(made, tuple) and len(made) == 2:
        example, targets = made
    else:
        example, targets = (made, None)
    if isinstance(example, Mapping) and len(example) == 1:
        inner = next(iter(example.values()))
    else:
        inner = None
    # the forward's one argument may be a mapping
    if isinstance(inner, Mapping):
        arguments = inner
    else:
        arguments = example
    if isinstance(arguments, Mapping):
        rows = next(iter(arguments.values()), None)
    else:
        rows = arguments
    if not isinstance(rows, Tensor) or not (targets is None or isinstance(targets, Tensor)):
        if targets is None:
            what = f"a {type(rows).__name__}"
        else:
            what = f"a {type(rows).__name__} and a {type(targets).__name__}"
        raise ConfigError(
            f"{value!r} returns {what}: return a tensor, or a mapping of the forward's keyword"
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
        model = from_architecture(
            name,
            seed=request.seed,
            blocks=request.config["depth"] if "depth" in request.typed else None,
            dt=check_dt(request.config["dt"]),
            dtype=get_dtype(request.dtype),
            on_demand=request.stream,
            anatomy=None if request.anatomy is None else read_anatomy(request.anatomy),
        )
    path = Path(name)
    if name in PRESETS:
        directory = None
    elif path.is_dir():
        directory = path
    else:
        directory = path.parent
    return _of_opened(open_imported(model, directory, _loss(request)), request, path.name)


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
    return ModelSource(
        config=config,
        make=lambda: opened.model,
        name=name,
        vocabulary=opened.vocabulary,
        segments=len(depth.sublayers),
        context=context,
        longest=longest,
        placements=tuple(dict.fromkeys(sublayer.placement.name for sublayer in depth.sublayers)),
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
