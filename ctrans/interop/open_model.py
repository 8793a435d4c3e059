"""Opens a model of any origin for the analyses of ctrans: a Hugging Face directory, a nanoGPT
checkpoint or any module.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ctrans.base.as_found import keep_as_found, leaving_as_found
from ctrans.base.memory import check_fits, too_large_to_stay
from ctrans.base.printable import one_line
from ctrans.dynamics.depth import Depth, check_dt
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.example_inputs import example_of
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.hugging_face import (
    CONFIG,
    directory_weights,
    from_transformers,
    load_local,
    open_local,
    read_settings,
)
from ctrans.interop.imported import Imported
from ctrans.interop.losses import Loss
from ctrans.interop.module_adapter import Example, ModuleAdapter
from ctrans.interop.nanogpt import CHECKPOINT, read_nanogpt
from ctrans.interop.opened import Opened
from ctrans.interop.ot_transformer import OTTransformer
from ctrans.interop.probe_weights import probe_weights, random_states
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.interop.transformers_library import quiet, reading
from ctrans.model.gpt import GPT
from solvers import ConfigError, shown

WRAPPERS = (DataParallel, DistributedDataParallel)
QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
"""The modules of torch whose kernels have no gradients."""
PICKLED = (".pt", ".pth")
"""Suffixes of files that torch.save writes."""


@leaving_as_found
def open_model(
    model: str | Path | nn.Module,
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
    example: Example | None = None,
    heads: int | None = None,
    images: bool = False,
    allow_pickle: bool = False,
) -> Opened:
    """Opens a model for analysis: a Hugging Face directory, a nanoGPT `ckpt.pt` (or the directory
    that holds it), or any module.

    - `dtype`: of the weights. Default: float64 for files, its own for a module. A module of another
      dtype is copied and then converted
    - `dt`: multiplies the length of each segment; 1 is the model
    - `on_demand`: reads a directory's weights when they are used. Default: if they take more than a
      quarter of this machine's memory (see `ctrans.dynamics.weights.on_demand`)
    - `blocks`, `attention`, `ffn`: paths of attributes, from the module to its list of blocks, and
      from a block to its attention and FFN (several modules act in sequence). By default they are
      found by what they do in a forward pass
    - `embed`, `head`: functions from inputs to X_0 and from X_T to the output, which replace what
      the module does around its blocks
    - `loss`: a name in `LOSS_NAMES`, or a function of the module's output and the targets
    - `example`: an input batch of the module (tokens, images, features), or the keyword arguments
      of its forward. Default: sequences of token ids, if the module has an embedding
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
    >>> open_model(my_module, example=torch.zeros(2, 3, 32, 32), loss=torch.nn.functional.cross_entropy).depth

    Raises ConfigError, saying what to give, for a model that cannot be read or recognised (see
    `from_transformers`, `from_nanogpt`).
    """
    if dt is None:
        dt = 1.0
    else:
        dt = check_dt(dt)
    anatomy = Anatomy(blocks, attention, ffn)
    if heads is not None and (
        isinstance(model, nn.Module) or _find(Path(model)).suffix not in PICKLED
    ):
        raise ConfigError(
            f"heads = {shown(heads)} is only for a bare state dict of nanoGPT: leave it out"
            " (--heads)"
        )
    if isinstance(model, nn.Module):
        own = unwrap_model(model)
        module = _ready(own, dtype)
        if module is not own and (embed or head):
            raise ConfigError(
                f"dtype = {dtype} copies the module, which embed= and head= use: give the"
                " module.to(dtype)"
            )
        if isinstance(module, Imported):
            inner = module.model
            shared = {id(each): each for each in (*inner.modules(), *inner.parameters())}
            return keep_as_found(open_imported(deepcopy(module, shared), loss=loss), inner)

        def read() -> Imported:
            inputs = example
            try:
                if (
                    embed is None
                    and head is None
                    and example is None
                    and hasattr(getattr(module, "config", None), "model_type")
                ):
                    inputs = example_of(module)
                    return from_transformers(module, dt=dt, anatomy=anatomy)
                if example is None:
                    inputs = _token_example(module)
                else:
                    inputs = example
                return Imported(
                    module, dt=dt, adapter=ModuleAdapter(module, anatomy, inputs, embed, head)
                )
            except FOREIGN_ERRORS as error:
                if inputs is None or embed or head or anatomy != Anatomy():
                    raise
                return _by_its_sums(module, inputs, dt, error)

        with reading(f"cannot open {type(module).__name__}"):
            return keep_as_found(_open_probed(module, read, None, loss), module)
    if not isinstance(model, (str, os.PathLike)):
        if callable(model):
            called = ": call it first"
        else:
            called = ""
        raise ConfigError(
            f"the model is a {type(model).__name__}{called}: give an nn.Module or a path"
        )
    found = _find(Path(model))
    pickled = found.suffix in PICKLED
    around = {"embed": embed, "head": head, "example": example}
    refused = [
        name
        for name, value in (vars(anatomy) | around if pickled else around).items()
        if value is not None
    ]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)} given for {str(model)!r}: leave them out; the files of a"
            " checkpoint define them"
        )
    kept = dtype or torch.float64
    if pickled:
        return _from_nanogpt(found, kept, loss, dt, on_demand, heads)
    return _from_transformers(found, kept, loss, dt, on_demand, anatomy, images, allow_pickle)


def _ready(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module, or a copy of it in that dtype. Raises ConfigError for one that cannot be read."""
    for path, part in module.named_modules():
        why = _unreadable(part)
        if why:
            raise ConfigError(f"{path or type(module).__name__} {why}")
    if isinstance(module, (GPT, OTTransformer)):
        raise ConfigError(
            f"a {type(module).__name__} is already a model of ctrans: pass it to screen, simulate"
            " and the others"
        )
    if dtype is None or all(
        weight.dtype == dtype for weight in module.parameters() if weight.is_floating_point()
    ):
        return module
    try:
        return deepcopy(module).to(dtype)
    except FOREIGN_ERRORS as error:
        raise ConfigError(
            f"dtype = {dtype} needs a copy: give the module.to(dtype) ({named_error(error)})"
        ) from error


def _open_probed(
    module: nn.Module, read: Callable[[], Imported], directory: Path | None, loss: str | Loss | None
) -> Opened:
    """Opens what `read` makes of the module, which has `probe_weights` meanwhile."""
    with probe_weights(module) as broken:
        opened = open_imported(read(), directory, loss)
    if broken:
        if len(broken) > 1:
            more = f" and {len(broken) - 1} more"
        else:
            more = ""
        opened.described += f"; not finite: the weight {broken[0]}{more}"
    return opened


def _by_its_sums(module: nn.Module, example: Example, dt: float, because: Exception) -> Imported:
    """The module by its residual stream. Raises the error because of which its blocks are not read,
    if it has none.
    """
    try:
        adapter = StreamAdapter(module, Anatomy(), example)
        adapter.because += f"its blocks are not read: {one_line(because)}"
        return Imported(module, dt=dt, adapter=adapter)
    except ConfigError as error:
        if str(error) == str(because):
            raise
        raise ConfigError(f"{because}; nor is it read by its sums: {error}") from because


def _token_example(module: nn.Module) -> Tensor:
    """Two sequences of token ids for a module that embeds tokens. Raises ConfigError for other
    modules.
    """
    tables = [
        part
        for part in module.modules()
        if isinstance(part, nn.Embedding) and part.num_embeddings > 1
    ]
    table = min(
        tables, key=lambda part: part.num_embeddings, default=None
    )  # ids that fit each of the tables
    if table is None:
        raise ConfigError(
            f"example=: {type(module).__name__} embeds no tokens, so its input is unknown: give a"
            " batch of inputs, such as torch.zeros(2, 3, 224, 224) for images"
        )
    # 0 is often padding even if no table says so
    padding = {
        0,
        *(
            part.padding_idx % part.num_embeddings
            for part in tables
            if part.padding_idx is not None
        ),
    }
    usable = [
        i
        for i in range(table.num_embeddings)
        if i not in padding or table.num_embeddings < 2 + len(padding)
    ]
    places = torch.randint(
        len(usable), (2, EXAMPLE_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    return torch.tensor(usable, device=table.weight.device)[places]


EXAMPLE_TOKENS = 6
"""The number of tokens of a default example."""


def _unreadable(part: nn.Module) -> str:
    """Why a part of a module cannot be read; empty if it can."""
    own = list(part.parameters(recurse=False))
    if any(map(nn.parameter.is_lazy, own)):
        return "is lazy and has no weights yet: run the module on one batch first"
    if any(weight.is_meta for weight in own):
        return "is on the meta device and has no weights: load them first"
    if any(weight.is_inference() for weight in own):
        return (
            "was made in inference mode and has no derivatives: make it without"
            " torch.inference_mode"
        )
    if hasattr(part, "_orig_mod"):
        return "is compiled: open the model first, then compile its parts"
    if type(part).__module__.startswith(QUANTISED):
        return (
            "is quantised by torch.ao and has no derivatives: open the model before it is quantised"
        )
    return ""


def open_imported(
    model: Imported, directory: Path | None = None, loss: str | Loss | None = None
) -> Opened:
    """Opens an imported model as `open_model` opens a directory's. Its tokenizer is looked for in
    the directory.
    """
    like = model.adapter.like()
    first, *others = model.depth.sublayers
    causal = all(
        _is_causal(part.field, like) for part in (first, *(others if first.kind == "part" else ()))
    )
    predicts = model.adapter.predicts()
    model.forget()
    opened = Opened(
        model,
        directory,
        str(model.config),
        loss,
        model.vocabulary,
        causal=causal,
        predicts=predicts,
    )
    if model.adapter.apart:
        which = sorted(model.adapter.apart)
        opened.described += (
            f"; a loss must not read outputs {which} (from 0), which are no functions of the last"
            " state alone"
        )
    if model.vocabulary and not causal and opened.loss in BOTH_WAYS:
        opened.described += (
            f"; each token also reads later tokens, {BOTH_WAYS[opened.loss]}. If this is a GPT, its"
            " causal mask is missing"
        )
    return opened


BOTH_WAYS = {
    "mlm": "so its loss is that of hidden tokens",
    "next": "including those that it predicts",
}
"""By loss: the consequence for a model in which tokens read both ways."""


def _find(path: Path) -> Path:
    """The Hugging Face directory, or the file of the checkpoint."""
    if os.path.isfile(path) and path.suffix in PICKLED:
        return path
    is_directory = os.path.isdir(path)
    if is_directory and os.path.isfile(path / CONFIG):
        return path
    if is_directory and os.path.isfile(path / CHECKPOINT):
        return path / CHECKPOINT
    wanted = (
        f"give a directory with {CONFIG} (Hugging Face), or a {CHECKPOINT} or its directory"
        " (nanoGPT)"
    )
    if is_directory:
        raise ConfigError(f"{str(path)!r} holds neither {CONFIG} nor {CHECKPOINT}: {wanted}")
    file, _, function = str(path).rpartition(":")
    if function.isidentifier() and file.endswith(".py"):
        raise ConfigError(
            f"{str(path)!r} is no directory: for a function that makes a module use --python {path}"
        )
    if os.path.exists(path):
        what = "is no checkpoint"
    else:
        what = "does not exist (nothing is downloaded)"
    raise ConfigError(f"{str(path)!r} {what}: {wanted}")


def _from_nanogpt(
    path: Path,
    dtype: torch.dtype,
    loss: str | Loss | None,
    dt: float,
    on_demand: bool | None,
    heads: int | None,
) -> Opened:
    if on_demand:
        raise ConfigError(f"{str(path)!r} cannot be read on demand: leave out on_demand (--stream)")
    with warnings.catch_warnings(action="ignore"):  # about pickles, which raise an error anyway
        model, notes = read_nanogpt(path, heads=heads)
    model = model.to(dtype).requires_grad_(False).eval()
    if isinstance(model, OTTransformer):
        said = str(model.with_scale(dt).config)
    else:
        c = model.config = dataclasses.replace(model.config, dt=dt)
        model.depth = Depth(model.depth.sublayers, dt)
        said = (
            f"nanoGPT: {c.depth} block{'s' * (c.depth != 1)} of width {c.width}, {c.heads} heads,"
            f" placement {c.placement}, {c.norm}"
        )
    own = model.config
    said = "; ".join([said, *notes])
    return Opened(model, path.parent, said, loss, own.vocab_size, causal=own.causal, predicts=True)


def _from_transformers(
    directory: Path,
    dtype: torch.dtype,
    loss: str | Loss | None,
    dt: float,
    on_demand: bool | None,
    anatomy: Anatomy,
    images: bool,
    allow_pickle: bool,
) -> Opened:
    _check_foreign(directory)
    size = _entries(directory, allow_pickle) * dtype.itemsize
    if on_demand is None:
        on_demand = too_large_to_stay(size)
    else:
        on_demand = on_demand
    if not on_demand:
        check_fits(
            size,
            "choose a smaller --dtype, or read the weights on demand (on_demand=True, --stream)",
        )
    with quiet(), reading(f"cannot open {str(directory)!r}"):
        try:
            loaded: Any = (
                open_local(directory, anatomy, dtype, allow_pickle)
                if on_demand
                else load_local(directory, dtype, allow_pickle)
            )
            if hasattr(
                loaded, "set_experts_implementation"
            ):  # fused kernels of experts have no float64
                loaded.set_experts_implementation("eager")
            read = partial(from_transformers, loaded, dt=dt, anatomy=anatomy, images=images)
            return _open_probed(loaded.requires_grad_(False), read, directory, loss).eval()
        except RuntimeError as error:  # some modules have kernels only for some dtypes
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{str(directory)!r} does not run in {kind}, choose another --dtype:"
                f" {one_line(error)}"
            ) from None


def _check_foreign(directory: Path) -> None:
    """Raises ConfigError for a checkpoint of ctrans, which has its own option."""
    config = read_settings(directory / CONFIG)
    if "placement" in config and "model_type" not in config:
        raise ConfigError(f"{str(directory)!r} is a checkpoint of ctrans: pass it as --checkpoint")


def _entries(directory: Path, allow_pickle: bool) -> int:
    """How many numbers the files of weights hold; 0 if they cannot be read, for which loading
    raises the error.
    """
    try:
        stored = directory_weights(directory, allow_pickle)
    except ConfigError:
        return 0
    return sum(math.prod(weight.shape) for weight in stored.values())


def _is_causal(attention: nn.Module, like: Tensor) -> bool:
    """Whether the first token reads no other token: d|f(x)_1|^2/dx_j = 0 exactly for all j > 1, for
    states of the shape of `like` (tokens, width).

    All j are tested, because a window may hide the last token in a model that reads both ways.
    """
    x = random_states(like.unsqueeze(0)).requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(attention(x)[0, 0].square().sum(), x)
    return not gradient[0, 1:].any()


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
