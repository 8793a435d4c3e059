"""A model from disk, whoever wrote it, as what the instruments look at: a Hugging Face directory or a nanoGPT checkpoint."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from pathlib import Path
from typing import Any

import safetensors
import torch
from jaxtyping import Int
from torch import Tensor, nn

from ctrans.depth import Depth, check_dt
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.hugging_face import (
    CONFIG,
    from_transformers,
    import_transformers,
    load_local,
    one_line,
    open_local,
    read_settings,
    weight_files,
)
from ctrans.interop.imported import Imported
from ctrans.interop.inputs import main_input
from ctrans.interop.nanogpt import read_nanogpt
from ctrans.interop.ot_transformer import OTTransformer
from ctrans.interop.streamed import stored_weights
from ctrans.interop.tokens import Tokeniser, find_tokeniser, quiet
from ctrans.model.gpt import GPT
from ctrans.weights.on_demand import check_fits, too_large_to_stay
from solvers import ConfigError

NANOGPT = "ckpt.pt"
PICKLED = (".pt", ".pth")
"""How files end that torch.save writes."""
HIDDEN_EVERY = 7
"""One token in so many is hidden from a model that fills gaps: the 15 % of BERT's training, at fixed places."""


@dataclasses.dataclass(frozen=True, eq=False)
class Opened:
    """A model from disk: in evaluation mode, without gradients, with what `ctrans` asks of any model.

    `causal` is whether tokens read only earlier ones, as seen in what its first attention computes. `predicts` is whether its
    head gives logits of tokens, so that there is a loss.
    """

    model: GPT | OTTransformer | Imported
    directory: Path | None
    described: str
    vocabulary: int
    causal: bool
    predicts: bool

    def tokeniser(self) -> Tokeniser:
        """How text becomes its tokens; byte by byte for a model without a directory. Errors as `find_tokeniser`."""
        return find_tokeniser(self.directory, self.vocabulary)

    def pairs(self, windows: Int[Tensor, "batch longer"], mask: int | None = None) -> tuple[Tensor, Tensor]:
        """Tokens and their targets, of the loss that the model was trained for. Raises ConfigError for one without such a head.

        A causal model predicts each next token. A model that reads both ways is trained to fill gaps: every seventh token is
        hidden by `mask`, and is the target there, -1 elsewhere. Without a mask every token is its own target, the part of that
        training in which chosen tokens are left as they are.
        """
        if not self.predicts:
            raise ConfigError(
                f"the model at {str(self.directory)!r} has no head of logits over its {self.vocabulary} tokens, so "
                "there is no loss: save it with its language-model head, or look at it by ctrans simulate"
            )
        if self.causal:
            return windows[:, :-1], windows[:, 1:]
        tokens = windows[:, :-1]
        if mask is None:
            return tokens, tokens
        hidden = (torch.arange(tokens.shape[1], device=tokens.device) % HIDDEN_EVERY == 0).expand_as(tokens)
        return torch.where(hidden, mask, tokens), torch.where(hidden, tokens, -1)


def open_model(
    path: str | Path, dtype: torch.dtype = torch.float64, *, dt: float | None = None, on_demand: bool | None = None
) -> Opened:
    """The model in a Hugging Face directory, or of a nanoGPT `ckpt.pt` or the directory that holds one; `dt` in place of its 1.

    With `on_demand` a directory's weights are read when they are used, by default where they are more than a quarter of this
    machine's memory (see `ctrans.weights.on_demand`).

    >>> opened = open_model("models/gpt2", torch.float32)
    >>> screen(opened.model, *opened.pairs(windows))

    Raises ConfigError in a line for whatever cannot be read or is not known (see `from_transformers`, `from_nanogpt`), and for a
    model of images.
    """
    dt = 1.0 if dt is None else check_dt(dt)
    found = _find(Path(path))
    return (_from_nanogpt if found.suffix in PICKLED else _from_transformers)(found, dtype, dt, on_demand)


def open_imported(model: Imported, directory: Path | None = None) -> Opened:
    """What `open_model` makes of a directory, of a model that is there already; its tokenizer is looked for in the directory."""
    model = model.requires_grad_(False).eval()
    if main_input(model.model) == "pixel_values":
        where = "" if directory is None else f" at {str(directory)!r}"
        raise ConfigError(f"{model.config.model}{where} takes images, and this reads text: give a language model")
    head = model.model.get_output_embeddings()
    causal = _is_causal(model.depth.sublayers[0].field, model.config.width, next(model.parameters()))
    return Opened(model, directory, str(model.config), model.vocabulary, causal, head is not None)


def _find(path: Path) -> Path:
    """The Hugging Face directory, or the checkpoint's file."""
    if os.path.isfile(path) and path.suffix in PICKLED:
        return path
    if os.path.isdir(path) and os.path.isfile(path / CONFIG):
        return path
    if os.path.isdir(path) and os.path.isfile(path / NANOGPT):
        return path / NANOGPT
    wanted = f"give a directory with {CONFIG} (Hugging Face), or one with {NANOGPT} or such a file (nanoGPT)"
    if os.path.isdir(path):
        raise ConfigError(f"{str(path)!r} holds neither {CONFIG} nor {NANOGPT}: {wanted}")
    what = "is no checkpoint" if os.path.exists(path) else "does not exist, and nothing is downloaded"
    raise ConfigError(f"{str(path)!r} {what}: {wanted}")


def _from_nanogpt(path: Path, dtype: torch.dtype, dt: float, on_demand: bool | None) -> Opened:
    if on_demand:
        raise ConfigError(f"{str(path)!r} can only be read whole: leave out on_demand (--stream)")
    with warnings.catch_warnings(action="ignore"):  # of pickles that are refused anyway
        model, notes = read_nanogpt(path)
    model = model.to(dtype).requires_grad_(False).eval()
    if isinstance(model, OTTransformer):
        said = str(model.with_scale(dt).config)
    else:
        c = model.config = dataclasses.replace(model.config, dt=dt)
        model.depth = Depth(model.depth.sublayers, dt)
        said = f"nanoGPT: {c.depth} block{'s' * (c.depth != 1)} of width {c.width}, {c.heads} heads, placement {c.placement}, {c.norm}"
    return Opened(model, path.parent, "; ".join([said, *notes]), model.config.vocab_size, model.config.causal, True)


def _from_transformers(directory: Path, dtype: torch.dtype, dt: float, on_demand: bool | None) -> Opened:
    _check_foreign(directory)
    size = _entries(directory) * dtype.itemsize
    on_demand = too_large_to_stay(size) if on_demand is None else on_demand
    if not on_demand:
        check_fits(size, "choose a narrower --dtype, or have them read on demand (on_demand=True, --stream)")
    with quiet(import_transformers()):
        try:
            loaded: Any = open_local(directory, Anatomy(), dtype) if on_demand else load_local(directory, dtype)
            if hasattr(loaded, "set_experts_implementation"):  # fused kernels of experts know no float64
                loaded.set_experts_implementation("eager")
            return open_imported(from_transformers(loaded, dt=dt), directory)
        except RuntimeError as error:  # some modules have kernels for some dtypes only
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(f"{str(directory)!r} does not run in {kind}, choose another --dtype: {one_line(error)}") from None


def _check_foreign(directory: Path) -> None:
    """Raises ConfigError for a checkpoint of our own, which has another option."""
    config = read_settings(directory / CONFIG)
    if "placement" in config and "model_type" not in config:
        raise ConfigError(f"{str(directory)!r} is a checkpoint of ctrans: give it by --checkpoint")


def _entries(directory: Path) -> int:
    """How many numbers the files of weights hold; 0 where they cannot be read, which reading the model says."""
    try:
        stored = stored_weights([directory / name for name in weight_files(directory)])
    except (ConfigError, safetensors.SafetensorError, OSError):
        return 0
    return sum(math.prod(weight.shape) for weight in stored.values())


def _is_causal(attention: nn.Module, width: int, like: Tensor) -> bool:
    """Whether the first of three tokens is blind to the last: d|f(x)_1|^2/dx_3 = 0 exactly."""
    x = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0)).to(like).requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(attention(x)[0, 0].square().sum(), x)
    return not bool(gradient[0, -1].any())
