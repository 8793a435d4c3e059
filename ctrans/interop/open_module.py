"""Opens an `nn.Module` of any library for the analyses of ctrans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.as_found import keep_as_found
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.example_inputs import Example, by_name, example_of
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.hugging_face import from_transformers
from ctrans.interop.imported import Imported
from ctrans.interop.loss_names import Loss
from ctrans.interop.opened import Opened, open_imported, open_probed
from ctrans.interop.ot_transformer import OTTransformer
from ctrans.interop.scripted import why_scripted
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.interop.transformers_library import reading
from ctrans.interop.unreadable import why_unreadable
from ctrans.model.gpt import GPT
from solvers import ConfigError

QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
"""The modules of torch whose kernels have no gradients."""
EXAMPLE_TOKENS = 6
"""The number of tokens of a default example."""


def open_module(
    user_module: nn.Module,
    dtype: torch.dtype | None,
    *,
    dt: float,
    anatomy: Anatomy,
    embed: Callable[[Tensor], Tensor] | None,
    head: Callable[[Tensor], Any] | None,
    loss: str | Loss | None,
    example: Example | Sequence[Any] | None,
) -> Opened:
    """Opens the user's module. Options and errors as in `open_model`."""
    module = _ready(user_module, dtype)
    example = by_name(module, example)
    if module is not user_module and (embed or head):
        raise ConfigError(
            f"dtype = {dtype} copies the module, which embed= and head= use: give the"
            " module.to(dtype)"
        )
    if isinstance(module, Imported):
        inner = module.model
        shared = {id(part): part for part in (*inner.modules(), *inner.parameters())}
        return keep_as_found(open_imported(deepcopy(module, shared), loss=loss), inner)

    all_from_the_module = embed is None and head is None and example is None
    inputs = example

    def imported() -> Imported:
        nonlocal inputs
        if all_from_the_module and _is_of_transformers(module):
            inputs = example_of(module)
            return from_transformers(module, dt=dt, anatomy=anatomy)
        if inputs is None:
            inputs = _token_example(module)
        adapter = StreamAdapter(module, anatomy, inputs, embed, head)
        return Imported(module, dt=dt, adapter=adapter)

    try:
        with reading(f"cannot open {type(module).__name__}"):
            return keep_as_found(open_probed(module, imported, None, loss), module)
    except ConfigError as error:
        reason = ""
        if inputs is not None:
            reason = why_unreadable(module, inputs) or why_scripted(module)
        if reason:
            raise ConfigError(reason) from error
        raise


def _is_of_transformers(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "model_type")


def _ready(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module, or a copy of it in that dtype. Raises ConfigError for one that cannot be read."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(why_scripted(module))
    for path, part in module.named_modules():
        problem = _unreadable(part)
        if problem:
            raise ConfigError(f"{path or type(module).__name__} {problem}")
    if isinstance(module, (GPT, OTTransformer)):
        raise ConfigError(
            f"a {type(module).__name__} is already a model of ctrans: pass it to screen, simulate"
            " and the others, or save it with ctrans.save and give them its directory"
        )
    if dtype is None:
        return module
    floats = (weight for weight in module.parameters() if weight.is_floating_point())
    if all(weight.dtype == dtype for weight in floats):
        return module
    try:
        return deepcopy(module).to(dtype)
    except FOREIGN_ERRORS as error:
        raise ConfigError(
            f"dtype = {dtype} needs a copy: give the module.to(dtype) ({named_error(error)})"
        ) from error


def _token_example(module: nn.Module) -> Tensor:
    """Two sequences of token ids for a module that embeds tokens. Raises ConfigError for other
    modules.
    """
    tables = [
        part
        for part in module.modules()
        if isinstance(part, nn.Embedding) and part.num_embeddings > 1
    ]
    if not tables:
        raise ConfigError(
            f"example=: {type(module).__name__} embeds no tokens, so its input is unknown: give a"
            " batch of inputs, such as torch.zeros(2, 3, 224, 224) for images"
        )
    # ids that fit each of the tables
    smallest = min(tables, key=lambda part: part.num_embeddings)
    padding = {0}  # 0 is often padding even if no table says so
    for part in tables:
        if part.padding_idx is not None:
            padding.add(part.padding_idx % part.num_embeddings)
    usable = list(range(smallest.num_embeddings))
    if smallest.num_embeddings >= 2 + len(padding):
        usable = [i for i in usable if i not in padding]
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(len(usable), (2, EXAMPLE_TOKENS), generator=generator)
    return torch.tensor(usable, device=smallest.weight.device)[indices]


def _unreadable(part: nn.Module) -> str:
    """Why a part of a module cannot be read; empty if it can."""
    weights = list(part.parameters(recurse=False))
    if any(map(nn.parameter.is_lazy, weights)):
        return "is lazy and has no weights yet: run the module on one batch first"
    if any(weight.is_meta for weight in weights):
        return "is on the meta device and has no weights: load them first"
    if any(weight.is_inference() for weight in weights):
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
