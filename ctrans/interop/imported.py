"""A Hugging Face model as what `control` and `stability` look at: X_0 = embed(tokens), a `Depth`, logits = head(X_T).

Nothing is copied. The depth's fields are the model's own modules, and what surrounds the blocks (embeddings, final norm, pooler,
head) is the model itself, run with its blocks passing their state on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.interop.anatomy import Anatomy, find_blocks
from ctrans.interop.attention_in_model import attention_in_model
from ctrans.interop.attention_reading import AttentionReading, random_states, read_attention
from ctrans.interop.block_calls import Call, evaluating, intercepted, recorded, recorded_until
from ctrans.interop.contexts import Contexts, showing_rows
from ctrans.interop.ffn_in_model import FeedForwardReading, ffn_in_model, read_ffn
from ctrans.interop.inputs import example_of, main_input, stand_in
from ctrans.interop.norms import AdaptedNorm
from ctrans.interop.recognise import ROLES, Structure, alike, make_of, recognise
from ctrans.scheme import trajectory
from ctrans.sublayer import Sublayer
from ctrans.weights.on_demand import has_weights_on_demand
from solvers import ConfigError, Solution

OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")
"""What a head's output is called, in order of preference."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What was seen in a model: printing it says so in a line.

    `norm` is "layernorm" or "rmsnorm" by what the norms compute, `norms` describes them. `context` is the longest sequence, None
    where the model does not say. How the weights were once drawn, no model says: `initialisation` is None. `unread` says what of its
    attention and FFN could not be read, so that some instruments cannot speak of it.
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
    unread: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.model} ({self.family}): {self.blocks} block{'s' * (self.blocks != 1)} of width {self.width}, "
            f"placement {self.placement}, attention {self.attention}, FFN {self.ffn}, norms {', '.join(self.norms) or 'none'}"
            f"{''.join(f'; {said}' for said in self.unread)}"
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
        contexts, each = Contexts(model, self.anatomy), not has_weights_on_demand(model)
        with evaluating(model):
            calls = recorded(blocks, lambda: model(**example_of(model)))
            structures = _structures(blocks, calls, self.anatomy, each=each)
            _say_what_they_are(blocks, structures, calls[0].x, contexts, each=each)
        self.depth = Depth([part for structure in structures for part in structure.sublayers], dt)
        self.config = _architecture(model, blocks, structures, calls[0].x.shape[-1], self.depth.dt)

    def forward(self, tokens: Tensor, targets: Int[Tensor, "*batch tokens"] | None = None) -> tuple[Tensor, Tensor | None]:
        """The logits, and with `targets` their mean cross-entropy in nats (targets of -1 are left out). Raises ConfigError
        where there are none.
        """
        logits = self.head(self.depth(self.embed(tokens)))
        if targets is None:
            return logits, None
        if targets.device.type == "cpu" and not (targets != -1).any():
            raise ConfigError(
                f"all {targets.numel()} targets are -1, so there is no loss: give at least one token to predict, or no targets"
            )
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
        result: Tensor | None = next((output[name] for name in OUTPUTS if name in output), None)
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
        count: int = self.model.get_input_embeddings().num_embeddings
        return count

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


def _say_what_they_are(
    blocks: list[nn.Module], structures: list[Structure], like: Tensor, contexts: Contexts, *, each: bool
) -> None:
    """Puts maps that say what they are in the place of the blocks' modules; read from each block, or from the first of its make."""
    known: dict[object, tuple[AttentionReading | str, FeedForwardReading | str]] = {}
    x = random_states(like)
    for i, (block, structure) in enumerate(zip(blocks, structures, strict=True)):
        attention, ffn, key = structure.attention, structure.ffn, i if each else make_of(block)
        if key not in known:
            ffn_seen = read_ffn(ffn.field, x)  # first, as its weights are still there where they come on demand
            output = attention.field(x, **contexts.of(i, x))
            with showing_rows(contexts.model):
                known[key] = read_attention(attention.field, x, output, contexts.of(i, x)), ffn_seen
        read_as, ffn_read_as = known[key]
        attention.field = attention_in_model(attention.field, i, contexts, read_as)
        ffn.field = ffn_in_model(ffn.field, ffn_read_as)


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
        unread=_unread(structures),
    )


def _unread(structures: list[Structure]) -> tuple[str, ...]:
    """What of attention and FFN is not shown and why, each said once."""
    said = (
        f"{name}: {part.field.why_not}"
        for structure in structures
        for name, part in (("attention", structure.attention), ("FFN", structure.ffn))
        if part.field.why_not
    )
    return tuple(dict.fromkeys(said))


def _norms(sublayer: Sublayer) -> list[AdaptedNorm]:
    return [norm for role in ROLES if (norm := getattr(sublayer, role)) is not None]


def _described(norm: AdaptedNorm) -> str:
    kind = "centred" if norm.centred else "not centred"
    return f"{type(norm.module).__name__} ({kind}, gamma = {'1 + ' if norm.shift else ''}weight, eps = {norm.eps:g})"
