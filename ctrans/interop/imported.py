"""A Hugging Face model as what `control` and `stability` look at: X_0 = embed(tokens), a `Depth`, logits = head(X_T).

Nothing is copied. The depth's fields are the model's own modules, and what surrounds the blocks (embeddings, final norm, pooler,
head) is the model itself, run with its blocks passing their state on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ctrans.depth import Depth
from ctrans.interop.anatomy import Anatomy, Chain, find_blocks
from ctrans.interop.block_calls import Call, evaluating, intercepted, recorded, recorded_until
from ctrans.interop.inputs import example_of, main_input, stand_in
from ctrans.interop.norms import AdaptedNorm
from ctrans.interop.recognise import ROLES, Structure, alike, make_of, recognise
from ctrans.scheme import trajectory
from ctrans.sublayer import Sublayer
from ctrans.weights.on_demand import has_weights_on_demand
from solvers import ConfigError, Solution

REMEMBERED = 8
"""For how many shapes of the state the contexts are kept."""
OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")
"""What a head's output is called, in order of preference."""


class Contexts:
    """What a model gives its blocks besides the state (masks, rotary embeddings), for states of any shape.

    A copy of a field goes on asking the same model; only a copy of the model with its fields asks the copy.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.model, self.anatomy = model, anatomy
        self._known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def of(self, block: int, x: Tensor) -> dict[str, Any]:
        """The context of that block for the state x (batch, tokens, width)."""
        # kernels differ in what masks they are given
        key = (x.shape, x.dtype, x.device, getattr(self.model.config, "_attn_implementation", None))
        if key not in self._known:
            blocks = find_blocks(self.model, self.anatomy)
            like = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            with torch.no_grad():
                calls = recorded_until(blocks, len(blocks) - 1, lambda: self.model(**stand_in(self.model, like)))
            if len(self._known) == REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = [call.context for call in calls]
        return self._known[key][block]

    def __deepcopy__(self, memo: dict[int, Any]) -> Contexts:
        model = memo.get(id(self.model))
        return self if model is None else Contexts(model, self.anatomy)


class AttentionInModel(nn.Module):
    """f(x): a model's attention module, given for any x what the model would give it.

    The fused kernel is used unless `plain` is set, which forward-mode and second derivatives need.
    """

    attention: Chain

    def __init__(self, attention: Chain, block: int, contexts: Contexts):
        super().__init__()
        self.attention, self.block, self.contexts = attention, block, contexts
        self.plain = False

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        return self._given(self.attention, x).reshape(x.shape)

    @property
    def last(self) -> nn.Linear:
        """The last linear map: f(x) = last(features(x)). Raises ConfigError where attention does not end in one."""
        return self.attention.last

    def features(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens features"]:
        """What the last linear map is applied to: the heads' averages, side by side."""
        return self._given(self.attention.features, x).reshape(*x.shape[:-1], -1)

    def _given(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        """The function of the states (batch, tokens, width), in the context that the model gives the block."""
        states = x.reshape(-1, *x.shape[-2:])
        with sdpa_kernel(SDPBackend.MATH) if self.plain else contextlib.nullcontext():
            return function(states, **self.contexts.of(self.block, states))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What was seen in a model: printing it says so in a line.

    `norm` is "layernorm" or "rmsnorm" by what the norms compute, `norms` describes them. `context` is the longest sequence, None
    where the model does not say. How the weights were once drawn, no model says: `initialisation` is None.
    """

    model: str
    family: str
    placement: str
    norm: str
    norms: tuple[str, ...]
    attention: str
    ffn: str
    blocks: int
    width: int
    context: int | None
    dt: float
    initialisation: None = None

    def __str__(self) -> str:
        return (
            f"{self.model} ({self.family}): {self.blocks} blocks of width {self.width}, placement {self.placement}, "
            f"attention {self.attention}, FFN {self.ffn}, norms {', '.join(self.norms) or 'none'}"
        )


class Imported(nn.Module):
    """X_0 = embed(tokens), dX/dt = v_k(X) by the model's own sublayers, logits = head(X_T); for an image model tokens are pixels.

    `config` says what was recognised. Raises ConfigError for models whose structure is not known, listing what was found.
    """

    model: Any  # a module of the library, whose methods nn.Module does not know

    def __init__(self, model: nn.Module, *, dt: float = 1.0, anatomy: Anatomy | None = None):
        super().__init__()
        self.anatomy = Anatomy() if anatomy is None else anatomy
        self.model = model
        blocks = find_blocks(model, self.anatomy)
        with evaluating(model):
            calls = recorded(blocks, lambda: model(**example_of(model)))
            structures = _structures(blocks, calls, self.anatomy, each=not has_weights_on_demand(model))
        contexts = Contexts(model, self.anatomy)
        for i, structure in enumerate(structures):
            structure.attention.field = AttentionInModel(structure.attention.field, i, contexts)
        self.depth = Depth([part for structure in structures for part in structure.sublayers], dt)
        self.config = _architecture(model, blocks, structures, calls[0].x.shape[-1], self.depth.dt)

    def forward(self, tokens: Tensor, targets: Int[Tensor, "*batch tokens"] | None = None) -> tuple[Tensor, Tensor | None]:
        """The logits, and with `targets` their mean cross-entropy in nats (targets of -1 are left out)."""
        logits = self.head(self.depth(self.embed(tokens)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)

    def embed(self, tokens: Tensor) -> Float[Tensor, "*batch tokens width"]:
        """X_0: what the model gives its first block for tokens (*batch, tokens), or images (batch, channels, height, width).

        Raises ConfigError for token ids beyond the vocabulary and texts longer than the model's context.
        """
        name = main_input(self.model)
        lead = tokens.shape[:-1]
        if name != "pixel_values":
            self._check_tokens(tokens)
            tokens = tokens.reshape(-1, tokens.shape[-1])
        call = recorded_until(self._blocks(), 0, lambda: self.model(**{name: tokens}))[0]
        return call.x if name == "pixel_values" else call.x.reshape(*lead, *call.x.shape[-2:])

    def head(self, x: Float[Tensor, "*batch tokens width"]) -> Tensor:
        """What the model makes of the last block's output: logits, or the last hidden state of a model without a head.

        Raises ConfigError for a model whose output is neither, naming what it has.
        """
        states = x.reshape(-1, *x.shape[-2:])

        def instead(i: int, call: Call) -> Tensor:
            return states if i == 0 else call.x

        with intercepted(self._blocks(), instead):
            output = self.model(**stand_in(self.model, states.detach()), return_dict=True)
        result = next((output[name] for name in OUTPUTS if name in output), None)
        if result is None:
            raise ConfigError(
                f"{self.config.model} gives {', '.join(output)}, and known here are {', '.join(OUTPUTS)}: take the family's class with "
                "a language-model head, or the one without a head"
            )
        return result.reshape(*x.shape[:-2], *result.shape[1:])

    def trajectory(self, tokens: Tensor, **options: Any) -> Solution:
        """X at depth-time 0 and at every segment's end, from X_0 = embed(tokens): `ctrans.scheme.trajectory`, whose options it has. Euler
        with one step is the model itself.
        """
        return trajectory(self.depth, self.embed(tokens), **options)

    @property
    def vocabulary(self) -> int:
        """How many tokens the model embeds."""
        return self.model.get_input_embeddings().num_embeddings

    def _blocks(self) -> list[nn.Module]:
        return find_blocks(self.model, self.anatomy)

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() == 0:
            raise ConfigError(f"the tokens are {tuple(tokens.shape)} of {tokens.dtype}: give int64 or int32 (*batch, tokens)")
        longest, vocabulary = self.config.context, self.vocabulary
        if longest is not None and tokens.shape[-1] > longest:
            raise ConfigError(f"{tokens.shape[-1]} tokens exceed the model's context of {longest}: shorten the text")
        # on an accelerator this check would wait for the device; there the embedding's own assertion reports it
        if tokens.device.type == "cpu" and tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ConfigError(
                f"tokens run from {int(tokens.min())} to {int(tokens.max())}, the vocabulary from 0 to {vocabulary - 1}"
            )


def _structures(blocks: list[nn.Module], calls: list[Call], anatomy: Anatomy, *, each: bool) -> list[Structure]:
    """Every block's structure; or, where running a block is dear, that of the first of its make."""
    if each:
        return [_seen(block, call, anatomy) for block, call in zip(blocks, calls, strict=True)]
    known: dict[object, tuple[nn.Module, Structure]] = {}
    for block, call in zip(blocks, calls, strict=True):
        if make_of(block) not in known:
            known[make_of(block)] = block, _seen(block, call, anatomy)
    structures = [alike(*known[make_of(block)], block, anatomy) for block in blocks]
    for block, structure in zip(blocks, structures, strict=True):
        for part, seen in zip(structure.sublayers, known[make_of(block)][1].sublayers, strict=True):
            part.field.ending = seen.field.ending
    return structures


def _seen(block: nn.Module, call: Call, anatomy: Anatomy) -> Structure:
    """The block's structure, and which linear maps its attention and FFN end in."""
    structure = recognise(block, call, anatomy)
    structure.attention.field.find_last(call.x, **call.context)
    structure.ffn.field.find_last(call.x)
    return structure


def _architecture(model: nn.Module, blocks: list[nn.Module], structures: list[Structure], width: int, dt: float) -> Architecture:
    config: Any = model.config
    norms = list(dict.fromkeys(norm for s in structures for part in s.sublayers for norm in _norms(part)))
    kinds = sorted({"layernorm" if norm.centred else "rmsnorm" for norm in norms})
    first = structures[0]
    chains = first.attention.field.attention, first.ffn.field
    attention, ffn = ("+".join(type(stage).__name__ for stage in chain.stages) for chain in chains)
    placements = ", ".join(dict.fromkeys(structure.placement for structure in structures))
    return Architecture(
        model=type(model).__name__,
        family=config.model_type,
        placement=placements,
        norm="/".join(kinds) or "none",
        norms=tuple(sorted({_described(norm) for norm in norms})),
        attention=attention,
        ffn=ffn,
        blocks=len(blocks),
        width=width,
        context=getattr(config, "max_position_embeddings", None),
        dt=dt,
    )


def _norms(sublayer: Sublayer) -> list[AdaptedNorm]:
    return [norm for role in ROLES if (norm := getattr(sublayer, role)) is not None]


def _described(norm: AdaptedNorm) -> str:
    kind = "centred" if norm.centred else "not centred"
    return f"{type(norm.module).__name__} ({kind}, gamma = {'1 + ' if norm.shift else ''}weight, eps = {norm.eps:g})"
