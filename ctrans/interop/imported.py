"""A Hugging Face model as what `control` and `stability` look at: X_0 = embed(tokens), a `Depth`,
logits = head(X_T).

Nothing is copied. The depth's fields are the model's own modules, and what surrounds the blocks
(embeddings, final norm, pooler, head) is the model itself, run with its blocks passing their state
on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ctrans.depth import Depth, check_dt
from ctrans.fields import ParallelMaps
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.attention_in_model import attention_in_model
from ctrans.interop.attention_reading import AttentionReading, random_states, read_attention
from ctrans.interop.attention_rows import showing_rows
from ctrans.interop.block_calls import evaluating
from ctrans.interop.ffn_in_model import FeedForwardReading, ffn_in_model, read_ffn
from ctrans.interop.model_adapter import OUTPUTS, Contexts, ModelAdapter
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.norms import AdaptedNorm, FreeNorm, WithoutGain
from ctrans.interop.recognise import ROLES, Structure, depth_of, make_of
from ctrans.interop.recorded_calls import own_module
from ctrans.interop.residual_scale import ScaledOutput
from ctrans.interop.transformers_adapter import TransformersAdapter
from ctrans.scheme import trajectory
from ctrans.sublayer import Sublayer
from ctrans.weights.on_demand import has_weights_on_demand
from solvers import ConfigError, Solution

MOST_LENGTHS = 6
"""Of more lengths of segments only the first are said."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What was seen in a model: printing it says so in a line.

    `dt` is the length of a segment in depth-time, how much the model adds of each map; where
    sublayers differ in it, `lengths` are the lengths that there are, and `dt` their unit.
    `parallel` says that attention and FFN of a block act at once, as one map. `norm` is "layernorm"
    or "rmsnorm" by what the norms compute, `norms` describes them. `context` is the longest
    sequence, None where the model does not say. How the weights were once drawn, no model says:
    `initialisation` is None. `unread` says what of its attention and FFN could not be read, so that
    some instruments cannot speak of it.
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
    lengths: tuple[float, ...] = (1.0,)
    parallel: bool = False
    initialisation: None = None
    unread: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.model} ({self.family}): {self.blocks} block{'s' * (self.blocks != 1)} of width {self.width}, "
            f"placement {self.placement}{self._lengths()}, attention {self.attention}, FFN {self.ffn}"
            f"{' at once, one segment for both' if self.parallel else ''}, norms "
            f"{', '.join(self.norms) or 'none'}"
            f"{''.join(f'; {said}' for said in self.unread)}"
        )

    def _lengths(self) -> str:
        """How long segments are, where they are not one long."""
        if self.lengths == (1.0,):
            return ""
        said = ", ".join(f"{length:g}" for length in self.lengths[:MOST_LENGTHS])
        return f", dt = {said}{', ..' if len(self.lengths) > MOST_LENGTHS else ''}"


class Imported(nn.Module):
    """X_0 = embed(tokens), dX/dt = v_k(X) by the model's own sublayers, logits = head(X_T); for an
    image model tokens are pixels.

    `config` says what was recognised. Raises ConfigError for models whose structure is not known,
    listing what was found.
    """

    model: Any  # a module of the library, whose methods nn.Module does not know

    def __init__(self, model: nn.Module, *, dt: float = 1.0, anatomy: Anatomy | None = None, adapter: ModelAdapter | None = None):
        super().__init__()
        self.model = model
        self.adapter: ModelAdapter = (
            TransformersAdapter(model, Anatomy() if anatomy is None else anatomy) if adapter is None else adapter
        )
        with evaluating(model):
            structures, like = self.adapter.structures()
            contexts = self.adapter.contexts(structures)
            _say_what_they_are(self.adapter.blocks(), structures, like, contexts, each=not has_weights_on_demand(model))
            self.adapter.check(depth_of(structures, 1.0))
        self.depth = depth_of(structures, check_dt(dt))
        self.config = _architecture(self.adapter, structures, like.shape[-1], self.depth)

    def forget(self) -> None:
        """Masks and the like are asked of the model again, whose weights are others than they were."""
        for part in self.depth.modules():
            contexts = getattr(part, "contexts", None)
            if isinstance(contexts, Contexts):
                contexts.forget()

    def forward(self, tokens: Tensor, targets: Int[Tensor, "*batch tokens"] | None = None) -> tuple[Tensor, Tensor | None]:
        """The logits, and with `targets` their mean cross-entropy in nats (targets of -1 are left
        out). Raises ConfigError where there are none.
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
        """X_0: what the model gives its first block for tokens (*batch, tokens), or images (batch,
        channels, height, width).

        Raises ConfigError for token ids beyond the vocabulary and texts longer than the model's
        context.
        """
        if self.vocabulary:
            self._check_tokens(tokens)
        return self.adapter.embed(tokens)

    def head(self, x: Float[Tensor, "*batch tokens width"]) -> Tensor:
        """What the model makes of the last block's output: logits, or the last hidden state of a
        model without a head.

        Raises ConfigError for a model whose output is neither, naming what it has.
        """
        output = self.outputs(x)
        result = self.adapter.tensor(output)
        if result is None:
            names = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
            raise ConfigError(
                f"{self.config.model} gives {names}, and known here are {', '.join(OUTPUTS)}: take the family's class with "
                "a language-model head, or the one without a head"
            )
        return result.reshape(*x.shape[:-2], *result.shape[1:])

    def outputs(self, x: Float[Tensor, "*batch tokens width"]) -> Any:
        """All that the model returns for the last block's output x, its leading axes made one."""
        return self.adapter.outputs(x.reshape(-1, *x.shape[-2:]))

    def trajectory(self, tokens: Tensor, **options: Any) -> Solution:
        """X at depth-time 0 and at every segment's end, from X_0 = embed(tokens):
        `ctrans.scheme.trajectory`, whose options it has. Euler with one step is the model itself.
        """
        return trajectory(self.depth, self.embed(tokens), **options)

    @contextlib.contextmanager
    def padded(self, mask: Tensor) -> Iterator[None]:
        """Inside, tokens at which the mask (batch, tokens) is 0 are padding, as the library's
        `attention_mask` has it.

        Every map, and so every instrument, is of these sequences alone: no token reads padding, and
        means over tokens leave it out (`Instrument.kept`). Give targets of -1 there. Raises
        ConfigError for a model that is not of `transformers`, and for masks that are none.
        """
        if not isinstance(self.adapter, TransformersAdapter) or not self.vocabulary:
            raise ConfigError(
                f"{self.config.model} takes no padding mask here: give it in example=, with the other arguments of its forward"
            )
        if mask.dim() != 2 or not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any(1).all()):
            raise ConfigError("a padding mask is (batch, tokens) of 1 for tokens and 0 for padding, a token in each row")
        before, self.adapter.padding = self.adapter.padding, mask.long()
        try:
            yield
        finally:
            self.adapter.padding = before

    @property
    def kept(self) -> Bool[Tensor, "batch tokens"] | None:
        """Where `padded` says that there is text; None outside of it."""
        mask = self.adapter.padding if isinstance(self.adapter, TransformersAdapter) else None
        return None if mask is None else mask.bool()

    @property
    def vocabulary(self) -> int:
        """How many tokens the model embeds; 0 where it reads something else."""
        return self.adapter.vocabulary

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() == 0:
            raise ConfigError(f"the tokens are {tuple(tokens.shape)} of {tokens.dtype}: give int64 or int32 (*batch, tokens)")
        longest, vocabulary = self.config.context, self.vocabulary
        if longest is not None and tokens.shape[-1] > longest:
            raise ConfigError(f"{tokens.shape[-1]} tokens exceed the model's context of {longest}: shorten the text")
        # on an accelerator this check would wait for the device; there the embedding's own
        # assertion reports it
        if tokens.device.type == "cpu" and tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ConfigError(
                f"tokens run from {int(tokens.min())} to {int(tokens.max())}, the vocabulary from 0 to {vocabulary - 1}"
            )


def _say_what_they_are(
    blocks: list[nn.Module], structures: list[Structure], like: Tensor, contexts: Contexts, *, each: bool
) -> None:
    """Puts maps that say what they are in the place of the blocks' modules; read from each block,
    or from the first of its make.
    """
    known: dict[object, tuple[AttentionReading | str, FeedForwardReading | str]] = {}
    x = random_states(like)
    for i, (block, structure) in enumerate(zip(blocks, structures, strict=True)):
        chains, key = structure.chains, i if each else make_of(block)
        if key not in known:
            ffn_seen = (
                read_ffn(chains[1], x) if len(chains) > 1 else ""
            )  # first, as its weights are still there where they come on demand
            output = chains[0](x, **contexts.of(i, x))
            with showing_rows(contexts.model):
                known[key] = read_attention(chains[0], x, output, contexts.of(i, x)), ffn_seen
        read_as, ffn_read_as = known[key]
        attention = attention_in_model(chains[0], i, contexts, read_as)
        if len(chains) == 1:
            structure.sublayers[0].field = attention
            continue
        ffn, first = ffn_in_model(chains[1], ffn_read_as), structure.sublayers[0]
        if isinstance(both := first.field, ParallelMaps):
            first.field = ParallelMaps(attention, ffn, (both.attention_gains, both.ffn_gains))
        else:
            first.field, structure.sublayers[1].field = attention, ffn


def _architecture(adapter: ModelAdapter, structures: list[Structure], width: int, depth: Depth) -> Architecture:
    sublayers = [part for structure in structures for part in structure.sublayers]
    norms = list(dict.fromkeys(norm for part in sublayers for norm in _norms(part)))
    maps = [_maps(structure) for structure in structures]
    stages = {what: "+".join(map(_said, _chain(each).stages)) for what, each in maps[0].items()}
    scaled = dict.fromkeys(what for each in maps for what, part in each.items() if _is_scaled(_chain(part)))
    unread = [f"{what}: {part.why_not}" for each in maps for what, part in each.items() if part.why_not]
    return Architecture(
        model=type(adapter.model).__name__,
        family=adapter.family,
        placement=", ".join(dict.fromkeys(structure.placement for structure in structures)),
        norm="/".join(sorted({"layernorm" if norm.centred else "rmsnorm" for norm in norms})) or "none",
        norms=tuple(sorted({_described(norm) for norm in norms})),
        attention=stages["attention"],
        ffn=stages.get("FFN", "none"),
        blocks=len(structures),
        width=width,
        context=adapter.context,
        dt=depth.dt,
        lengths=tuple(dict.fromkeys(depth.lengths)),
        parallel=sublayers[0].kind == "parallel",
        unread=(
            *(
                f"what its {what} adds is scaled, which is taken as part of that map, folded into its last weights"
                for what in scaled
            ),
            *dict.fromkeys(unread),
        ),
    )


def _maps(structure: Structure) -> dict[str, Any]:
    """Its attention and its FFN, if it has one, as maps that say what they are."""
    maps = [branch.field for part in structure.sublayers for branch in part.branches.values()]
    return dict(zip(("attention", "FFN"), maps, strict=False))


def _chain(map_: Any) -> ModuleChain:
    chain: ModuleChain = getattr(map_, "attention", map_)
    return chain


def _said(stage: nn.Module) -> str:
    """What a stage is called: the model's own module, or what stands for a function of the model's
    code.
    """
    said: str = getattr(stage, "said", type(own_module(stage)).__name__)
    return said


def _is_scaled(chain: ModuleChain) -> bool:
    """Whether it is scaled by channel, or by a number that is no length."""
    return chain.behind is not None or isinstance(chain.stages[-1], ScaledOutput)


def _norms(sublayer: Sublayer) -> list[AdaptedNorm | FreeNorm | WithoutGain]:
    return [norm for role in ROLES if (norm := getattr(sublayer, role)) is not None]


def _described(norm: AdaptedNorm | FreeNorm | WithoutGain) -> str:
    kind = "centred" if norm.centred else "not centred"
    if isinstance(norm, FreeNorm):
        return f"of the block's own forward ({kind}, gamma = 1, eps = {norm.eps:g})"
    form = norm.form if isinstance(norm, AdaptedNorm) else None
    name = None if form is None else form.gain
    gain = "of the maps" if form is None else "1" if name is None else f"1 + {name}" if form.shift else name
    eps = f"eps = {norm.eps:g}" if form is None or not form.added else f"eps = {form.added:g} beside the deviation"
    return f"{type(norm.module).__name__} ({kind}, gamma = {gain}, {eps})"
