"""Opens a model of any origin for the analyses of ctrans: a Hugging Face directory, a nanoGPT
checkpoint or any module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import ctrans.interop
from ctrans.base.as_found import as_found
from ctrans.dynamics.depth import check_dt
from ctrans.interop.example_inputs import Example
from ctrans.interop.loss_names import Loss
from solvers import ConfigError, is_class, shown

WRAPPERS = (DataParallel, DistributedDataParallel)
FRAMES = 10
"""Calls that Python has under way for each level of nested modules, at most: `copy.deepcopy` has
six.
"""


def open_model(
    model: Any,
    dtype: torch.dtype | None = None,
    *,
    dt: float | None = None,
    on_demand: bool | None = None,
    blocks: str | None = None,
    attention: str | Sequence[str] | None = None,
    ffn: str | Sequence[str] | None = None,
    embed: Callable[[Tensor], Tensor] | None = None,
    head: Callable[[Tensor], Any] | None = None,
    loss: str | Loss | None = None,
    example: Example | Sequence[Any] | None = None,
    heads: int | None = None,
    images: bool = False,
    allow_pickle: bool = False,
) -> ctrans.interop.Opened:
    """Opens a model for analysis: a Hugging Face directory, a nanoGPT `ckpt.pt` (or the directory
    that holds it), or any module.

    - `model`: a path, or an `nn.Module`
    - `dtype`: of the weights. Default: float64 for files, its own for a module. A module of another
      dtype is copied and then converted
    - `dt`: multiplies the length of each segment; 1 is the model
    - `on_demand`: reads a directory's weights when they are used. Default: if they take more than a
      quarter of this machine's memory (see `ctrans.dynamics.weights.on_demand`)
    - `blocks`: the path of attributes from the module to the list of blocks that count. By default
      all sums x + f(x) that follow one another in a forward pass count
    - `attention`, `ffn`: paths from a block to its attention and FFN (several modules act in
      sequence), which must be what was read
    - `embed`, `head`: functions from inputs to X_0 and from X_T to the output, which replace what
      the module does before and behind the sums that count
    - `loss`: a name in `LOSS_NAMES`, or a function of the module's output and the targets
    - `example`: an input batch of the module (tokens, images, features), or the arguments of its
      forward: by keyword in a dict, or in a list in its order. The first argument is the input. The
      others keep their values. Default: sequences of token ids, if the module has an embedding
    - `images`: opens the image tower of a directory's model with two towers (CLIP, SigLIP), and not
      the text tower
    - `allow_pickle`: also reads a directory's `pytorch_model.bin`, by torch's restricted unpickler
    - `heads`: the number of heads of a nanoGPT model stored as a bare state dict

    A module stays as it was found. What the opened model computes, it computes with the module in
    evaluation mode and without gradients of weights (`ctrans.base.as_found`). States are (batch,
    tokens, width) whatever the module's own order. The rebuilt blocks are compared with the
    module's output.

    >>> opened = open_model("models/gpt2", torch.float32)
    >>> screen(opened.model, *opened.pairs(windows))
    >>> images = torch.zeros(2, 3, 32, 32)
    >>> open_model(my_module, example=images, loss=torch.nn.functional.cross_entropy).depth

    Raises ConfigError, saying what to give, for a model that cannot be read or recognised (see
    `from_transformers`, `from_nanogpt`).
    """
    # imported here: the reader of other models is large, and a model of ctrans does not need it
    from ctrans.interop.anatomy import Anatomy
    from ctrans.interop.open_files import find_checkpoint, is_nanogpt, open_files
    from ctrans.interop.open_module import open_module

    if dt is None:
        length = 1.0
    else:
        length = check_dt(dt)
    check_model(model)
    anatomy = Anatomy(blocks, attention, ffn)
    if heads is not None and (
        isinstance(model, nn.Module) or not is_nanogpt(find_checkpoint(Path(model)))
    ):
        raise ConfigError(
            f"heads = {shown(heads)} is only for a bare state dict of nanoGPT: leave it out"
            " (--heads)"
        )
    if isinstance(model, nn.Module):
        with as_found(model):
            return open_module(
                unwrap_model(model),
                dtype,
                dt=length,
                anatomy=anatomy,
                embed=embed,
                head=head,
                loss=loss,
                example=example,
            )
    checkpoint = find_checkpoint(Path(model))
    module_options = {"embed": embed, "head": head, "example": example}
    if is_nanogpt(checkpoint):
        excluded = {**vars(anatomy), **module_options}
    else:
        excluded = module_options
    refused = [name for name, value in excluded.items() if value is not None]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)} given for {str(model)!r}: leave them out; the files of a"
            " checkpoint define them"
        )
    with as_found(model):
        return open_files(
            checkpoint,
            dtype or torch.float64,
            dt=length,
            on_demand=on_demand,
            anatomy=anatomy,
            loss=loss,
            heads=heads,
            images=images,
            allow_pickle=allow_pickle,
        )


def check_model(model: object) -> None:
    """Raises ConfigError unless it is a path or a module, and for a module whose submodules are in
    a cycle or nested too deep.
    """
    if isinstance(model, type):
        raise is_class("model", model)
    if isinstance(model, nn.Module):
        _check_nesting(model)
        return
    if isinstance(model, (str, os.PathLike)):
        return
    if callable(model):
        advice = "call it, and give the nn.Module that it returns"
    else:
        advice = "give an nn.Module or a path"
    raise ConfigError(f"model = {shown(model)}: {advice}")


def _check_nesting(module: nn.Module) -> None:
    """Raises ConfigError for a module that holds itself, or is nested too deep for torch, whose
    walks of modules are recursive.
    """
    kind = type(module).__name__
    deepest = sys.getrecursionlimit() // FRAMES
    names: list[str] = []
    on_the_path = [module]
    rests = [_children(module)]
    ids_on_the_path = {id(module)}
    done: set[int] = set()
    while rests:
        if not rests[-1]:
            rests.pop()
            last = on_the_path.pop()
            ids_on_the_path.remove(id(last))
            done.add(id(last))
            if names:
                names.pop()
            continue
        name, child = rests[-1].pop()
        if id(child) in ids_on_the_path:
            raise ConfigError(
                f"{kind} holds itself: {'.'.join([*names, name])} is a module around it, and torch"
                " cannot copy or convert such modules; keep that module in a list, which hides it"
                " from torch"
            )
        if id(child) in done:
            continue
        if len(rests) >= deepest:
            raise ConfigError(
                f"{kind} has modules that are nested more than {deepest} deep: put them next to"
                " each other in one nn.Sequential or nn.ModuleList, or raise"
                " sys.setrecursionlimit"
            )
        names.append(name)
        on_the_path.append(child)
        ids_on_the_path.add(id(child))
        rests.append(_children(child))


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that it holds itself, by name. Raises ConfigError for a module that was never
    initialised.
    """
    try:
        return list(module.named_children())
    except AttributeError as error:
        raise ConfigError(
            f"{type(module).__name__} was not initialised as a module: call super().__init__()"
            " first in its __init__"
        ) from error


def unwrap_model(module: nn.Module) -> nn.Module:
    """The module inside of torch.compile, DataParallel and DistributedDataParallel."""
    while True:
        if isinstance(module, WRAPPERS):
            inner = module.module
        else:
            inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner
