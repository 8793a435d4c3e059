"""The language model: embeddings, a `Depth` of attention and FFN sublayers, a final norm if the
placement needs one, and a head.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ctrans.base.memory import SHARE, check_fits, memory
from ctrans.base.shapes import Scalar, StreamRows, TokenIds
from ctrans.dynamics.depth import Depth, Sublayers, check_matches
from ctrans.dynamics.fields import FIELDS, Kind, OwnGains, ParallelMaps
from ctrans.dynamics.norm import NORMS, WITHOUT_GAINS, Norm, make_norm
from ctrans.dynamics.placement import BlockPlacement, Placement
from ctrans.dynamics.residual import RESIDUALS
from ctrans.dynamics.scheme import trajectory
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.functions_of_depth import blocks_through
from ctrans.dynamics.weights.on_demand import Piece, Shelf, put_on_demand, skeletons
from ctrans.model.config import FREE, GPTConfig, check_seed
from ctrans.model.initialisation import initialise
from ctrans.model.stack import stacked
from ctrans.model.unit_weights import put_on_spheres
from solvers import ConfigError, Solution, checked, is_dense, shown

TOKEN_TYPES = (torch.int64, torch.int32)


@checked
class GPT(nn.Module):
    """A decoder-only Transformer of any placement and dt: logits =
    head(N_final(depth(embed(tokens)))), with weights drawn from `seed`.

    `config.positions` sets the positional encoding. The head shares the token embedding's weights
    unless `config.tied` is False. `model.depth` is the `Depth`. With `on_demand`, the weights of
    each attention and FFN are drawn when they are used and dropped when the next map is used. They
    are the same weights, but need the memory of one sublayer only (see
    `ctrans.dynamics.weights.on_demand`).
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0, on_demand: bool = False):
        super().__init__()
        check_buildable(config, seed, on_demand=on_demand)
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = (
            nn.Embedding(config.context, config.width) if config.places.embedding else None
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for embedding in (self.token_embedding, self.position_embedding):
                if embedding is not None:
                    embedding.weight.normal_(0.0, config.embedding_std, generator=generator)
        if config.tied:
            self.unembedding = None
        else:
            self.unembedding = nn.Linear(config.width, config.vocab_size, bias=False)
        self.depth = (drawn_depth if on_demand else make_depth)(config, generator)
        self.final_norm = (
            make_norm(config)
            if config.placements[-1].ffn.final_norm and not config.is_stack
            else nn.Identity()
        )
        # nGPT's s_z: without it rows of length 1 give logits of at most 1, and the cross-entropy
        # stays near that of guessing
        on_spheres = RESIDUALS[config.residual].unit_weights
        self.logit_scale = (
            nn.Parameter(torch.full((config.vocab_size,), config.width**-0.5))
            if on_spheres
            else None
        )
        if self.unembedding is not None:
            nn.init.normal_(self.unembedding.weight, 0.0, config.embedding_std, generator=generator)
        self._normalise_embeddings()

    def forward(
        self, tokens: TokenIds, targets: TokenIds | None = None
    ) -> tuple[Float[Tensor, "*batch tokens vocab"], Scalar | None]:
        """The logits of each next token; with `targets` also their mean cross-entropy in nats.
        Targets of -1 and -100 do not count.
        """
        logits = self.head(self.depth(self.embed(tokens)))
        return logits, None if targets is None else self.loss(logits, tokens, targets)

    def loss(self, logits: Tensor, tokens: Tensor, targets: Tensor) -> Scalar:
        """The mean cross-entropy in nats over all targets except -1. Raises ConfigError for no such
        target and for unknown tokens.
        """
        if not is_dense(logits) or not is_dense(tokens):
            raise ConfigError(
                f"logits = {shown(logits)} and tokens = {shown(tokens)}: give two dense tensors"
            )
        if not is_dense(targets) or targets.dtype != torch.int64:
            if is_dense(targets):
                what = f"of {targets.dtype}"
            else:
                what = shown(targets)
            raise ConfigError(
                f"the targets are {what}: give a tensor of int64 with the tokens' shape"
            )
        if targets.shape != tokens.shape:
            raise ConfigError(
                f"targets have shape {tuple(targets.shape)} and tokens {tuple(tokens.shape)}: give"
                " one target per token"
            )
        if logits.shape[:-1] != targets.shape:
            raise ConfigError(
                f"logits = {shown(logits)} for targets of shape {tuple(targets.shape)}: give one"
                " row per target"
            )
        self._check_device("targets", targets)
        targets = counted(targets)
        self._check_range("targets", targets.where(targets != -1, 0))
        return next_token_loss(logits, targets)

    def embed(self, tokens: TokenIds) -> StreamRows:
        """X_0: token embeddings plus learned position embeddings if there are any, once for each
        stream.

        Raises ConfigError for sequences longer than the context and for unknown tokens.
        """
        if not is_dense(tokens) or tokens.dtype not in TOKEN_TYPES or tokens.dim() == 0:
            if is_dense(tokens):
                what = f"{tuple(tokens.shape)} of {tokens.dtype}"
            else:
                what = shown(tokens)
            raise ConfigError(
                f"the tokens are {what}: give a tensor of int64 or int32 of shape (*batch, tokens)"
            )
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ConfigError(
                f"{length} tokens exceed the context of {self.config.context}: shorten the text or"
                " raise context"
            )
        self._check_device("tokens", tokens)
        self._check_range("tokens", tokens)
        x0: Tensor = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x0 = x0 + self.position_embedding(torch.arange(length, device=tokens.device))
        streams = self.config.state_streams
        if streams == 1:
            return x0
        return torch.cat([x0] * streams, -1)

    def head(self, x: StreamRows) -> Float[Tensor, "*batch tokens vocab"]:
        """Logits of the final hidden state; with several streams, of their mean."""
        if not is_dense(x) or x.shape[-1:] != (self.config.width * self.config.state_streams,):
            raise ConfigError(
                f"x = {shown(x)}: give states of width"
                f" {self.config.width * self.config.state_streams}"
            )
        check_matches("x", x, [self.head_weight()])
        if self.config.state_streams > 1:
            x = x.unflatten(-1, (self.config.state_streams, self.config.width)).mean(-2)
        return F.linear(self.final_norm(x), self.head_weight())

    def head_weight(self) -> Float[Tensor, "vocab width"]:
        """W of the logits W N_final(x): the embedding's or the head's own. With weights on spheres
        it is diag(s) W, s = sqrt(d) z with a trained z for each token that starts at 1/sqrt(d). So
        s moves at sqrt(d) times the learning rate (nGPT, arXiv 2410.01131, section 2.1).
        """
        weight = (self.token_embedding if self.unembedding is None else self.unembedding).weight
        if self.config.rules.logits:
            weight = weight * self.config.times_wider**self.config.rules.logits
        return (
            weight
            if self.logit_scale is None
            else self.logit_scale[:, None] * self.config.width**0.5 * weight
        )

    def trajectory(self, tokens: TokenIds, **options: Any) -> Solution:
        """X at depth-time 0 and at the end of each segment, from X_0 = embed(tokens). Options and
        errors are those of `ctrans.dynamics.scheme.trajectory`.
        """
        return trajectory(self.depth, self.embed(tokens), **options)

    def at_depth(self, blocks: int, weights: str = "linear") -> GPT:
        """A copy of this model with another number of blocks over the same depth-time T (for a
        stack, another number of steps).

        See `Depth.resample` for its weights. Raises ConfigError for a number of blocks below 1 and
        an unknown interpolation.
        """
        config = self.config.at_depth(blocks)
        model = copy.deepcopy(self, {id(self.depth): self.depth.resample(blocks, weights)})
        model.config = config
        return model

    def after_step(self) -> None:
        """Call this after each optimiser step. With the residual of nGPT it puts the weights back
        on their spheres; otherwise it does nothing.
        """
        if RESIDUALS[self.config.residual].unit_weights:
            put_on_spheres(self.depth.sublayers)
        self._normalise_embeddings()

    def _normalise_embeddings(self) -> None:
        if RESIDUALS[self.config.residual].unit_weights:
            parts = (self.token_embedding, self.position_embedding, self.unembedding)
            put_on_spheres([], [part for part in parts if part is not None])

    def _check_device(self, what: str, ids: Tensor) -> None:
        device = self.token_embedding.weight.device
        if ids.device != device:
            raise ConfigError(
                f"the {what} are on {ids.device} and the model is on {device}: move one to the"
                " other"
            )

    def _check_range(self, what: str, ids: Tensor) -> None:
        check_range(what, ids, self.config.vocab_size)


def check_range(what: str, ids: Tensor, vocabulary: int) -> None:
    """Raises ConfigError for ids outside of the vocabulary."""
    # on an accelerator the check would wait for the device, and in a compiled graph end it; there
    # the embedding raises
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        lowest = int(ids.min())
        highest = int(ids.max())
        if lowest < 0 or highest >= vocabulary:
            raise ConfigError(
                f"{what} run from {lowest} to {highest}, the vocabulary from 0 to {vocabulary - 1}"
            )


def counted(targets: Tensor) -> Tensor:
    """The targets with -1 in place of -100, torch's own number of those that do not count."""
    return torch.where(targets == -100, -1, targets)


def next_token_loss(logits: Tensor, targets: Tensor) -> Scalar:
    """The mean cross-entropy in nats over all targets except -1 and -100. Raises ConfigError if
    there is none."""
    targets = counted(targets)
    if targets.device.type == "cpu" and not (targets != -1).any():
        raise ConfigError(
            f"all {targets.numel()} targets are -1 or -100, so there is no loss: give at least one"
            " token to predict, or no targets"
        )
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)


def make_input_norm(config: GPTConfig) -> Norm:
    """A new norm in front of a map, without gains if the map has its own."""
    if config.branch_norms:
        return NORMS[WITHOUT_GAINS[config.norm]](config.width, config.eps)
    return make_norm(config)


def make_sublayer(config: GPTConfig, kind: Kind, placement: Placement, number: int) -> Sublayer:
    """A new sublayer of this kind with the placement's norms around its map; `number` counts from
    0.
    """
    return Sublayer(
        make_map(config, kind),
        kind,
        input_norm=make_input_norm(config) if placement.input_norm else None,
        output_norm=make_norm(config) if placement.output_norm else None,
        state_norm=make_norm(config) if placement.state_norm else None,
        gain=config.gain_of(placement),
        residual=RESIDUALS[config.residual].make(config, number),
        placement=placement,
    )


def make_block(config: GPTConfig, placements: BlockPlacement, block: int = 0) -> Sublayers:
    """The sublayers of a block: one of each kind, or one with both maps in parallel."""
    if config.parallel_blocks:
        return Sublayers([make_sublayer(config, "parallel", placements.attention, block)])
    each = zip(FIELDS, placements, strict=True)
    return Sublayers(
        make_sublayer(config, kind, placement, 2 * block + i)
        for i, (kind, placement) in enumerate(each)
    )


def make_map(config: GPTConfig, kind: Kind) -> nn.Module:
    """A new map of this kind, with weights not yet drawn."""
    if kind == "parallel":
        # each map has the gains, and the offset if there is one, of the norm in front of both
        offset = config.bias and getattr(NORMS[config.norm], "has_offset", False)
        gains = [OwnGains(config.width, bias=offset) if config.branch_norms else None for _ in FIELDS]
        return ParallelMaps(
            make_map(config, "attention"), make_map(config, "ffn"), (gains[0], gains[1])
        )
    return FIELDS[kind][getattr(config, kind)](config)


def make_depth(config: GPTConfig, generator: torch.Generator) -> Depth:
    """The configuration's blocks with drawn weights, either free or at the knots of functions of
    depth.

    Raises ConfigError for placements that differ by block if the weights are functions of depth.
    """
    if config.depth_weights != FREE and "+" in config.placement:
        raise ConfigError(
            "weights that are functions of depth need one placement for all blocks, not"
            f" {config.placement!r}"
        )
    if config.depth_weights == FREE:
        placements = config.placements
    else:
        placements = config.placements[:1] * config.weights_in_depth
    blocks = [make_block(config, each, block) for block, each in enumerate(placements)]
    draw([part for block in blocks for part in block], config, generator)
    if config.depth_weights != FREE:
        blocks = blocks_through(blocks, config.depth_weights, config.depth, generator)
    parts = [part for block in blocks for part in block]
    if not config.is_stack:
        return Depth(parts, config.step_length, per_block=config.per_block)
    # the final norm ends the velocity
    if config.placements[-1].ffn.final_norm:
        norm = make_norm(config)
    else:
        norm = None
    return stacked(
        Depth(parts, 1.0, per_block=config.per_block), config.segments, config.step_length, norm
    )


def draw(parts: Sequence[Sublayer], config: GPTConfig, generator: torch.Generator) -> None:
    """Draws the matrices of the sublayers by the configuration's initialisation, on their spheres
    if its residual requires it.
    """
    power = config.rules.drawn
    if power is None:
        base = {}
    else:
        base = {"wider": config.times_wider, "power": power}
    blocks = config.depth if power is None else config.depth / config.times_deeper
    initialise(parts, config.initialisation, generator, blocks=blocks, **base)
    if RESIDUALS[config.residual].unit_weights:
        put_on_spheres(parts)


def drawn_depth(config: GPTConfig, generator: torch.Generator) -> Depth:
    """`make_depth` with weights on demand. Raises ConfigError for weights that are functions of
    depth and for a stack.
    """
    if config.depth_weights != FREE:
        raise ConfigError(
            f"depth_weights = {config.depth_weights!r} cannot be on demand, only free weights can:"
            " leave out on_demand (--stream)"
        )
    if config.is_stack:
        raise ConfigError(
            "a stack needs all its weights at once: leave out on_demand (--stream) or stack_steps"
        )
    draws = _Draws(config, generator)
    shelf = Shelf()
    with skeletons():
        parts = [
            part
            for block, each in enumerate(config.placements)
            for part in make_block(config, each, block)
        ]
    for k, part in enumerate(parts):
        put_on_demand(part.field, Piece(f"segment {k}", partial(draws.weights, k)), shelf)
    return Depth(parts, config.step_length, per_block=config.per_block)


class _Draws:
    """Draws the weights of each map from the generator's state at which `make_depth` draws them.

    `states[k]` is the state before map k. To reach a later map, all maps before it are drawn.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator):
        self.config = config
        self.states = [generator.get_state()]

    def weights(self, k: int) -> dict[str, Tensor]:
        while len(self.states) <= k:
            self._draw(len(self.states) - 1)
        return self._draw(k)

    def _draw(self, k: int) -> dict[str, Tensor]:
        generator = torch.Generator()
        generator.set_state(self.states[k])
        block, kind = divmod(k, self.config.per_block)
        with skeletons():
            part = make_block(self.config, self.config.placements[block])[kind]
        part.field.to_empty(device="cpu")
        draw([part], self.config, generator)
        if k + 1 == len(self.states):
            self.states.append(generator.get_state())
        return {name: parameter.detach() for name, parameter in part.field.named_parameters()}


def number_of_weights(config: GPTConfig) -> int:
    """The number of entries of all weight matrices: those of embeddings and of all blocks."""
    embedded = config.vocab_size * (1 if config.tied else 2) + (
        config.context if config.places.embedding else 0
    )
    return embedded * config.width + config.weights_in_depth * weights_of_block(config)


def weights_of_block(config: GPTConfig) -> int:
    """The number of entries of one block's weight matrices."""
    try:
        with torch.device("meta"):
            maps = [table[getattr(config, kind)](config) for kind, table in FIELDS.items()]
    except RuntimeError:  # a matrix larger than the address space
        return sys.maxsize
    return sum(weight.numel() for made in maps for weight in made.parameters() if weight.dim() > 1)


class _Largest(TorchFunctionMode):
    """Keeps the bytes of the largest tensor that the first thousand operations make. The fused
    attention kernel makes no scores.
    """

    size, left = 0, 1000

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("enough")  # a map in a loop over tokens
        fused = func is F.scaled_dot_product_attention
        if fused:
            made = torch.empty_like(args[0])
        else:
            made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.size = max(
                self.size, made.untyped_storage().nbytes()
            )  # a view has those of its base
        return made


def first_activations(config: GPTConfig, sequences: int, tokens: int, dtype: torch.dtype) -> int:
    """The bytes of the largest tensor in one attention and FFN of so many sequences: a lower bound
    of what a pass needs. It is found on device "meta", where tensors have no numbers.
    """
    largest = _Largest()
    with largest, contextlib.suppress(RuntimeError, NotImplementedError):  # what numbers decide
        x = torch.empty(sequences, tokens, config.width, dtype=dtype, device="meta")
        with torch.device("meta"):
            maps = [
                table[getattr(config, kind)](config).to(dtype) for kind, table in FIELDS.items()
            ]
        for made in maps:
            made(x)
    return largest.size


def check_buildable(
    config: GPTConfig,
    seed: int,
    *,
    on_demand: bool = False,
    shape: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raises ConfigError for an invalid seed, and for weights that do not fit in this machine's
    memory; with the shape (sequences, tokens) of an input, for weights and first activations.
    """
    check_seed(seed)
    dtype = dtype or torch.get_default_dtype()
    weights = number_of_weights(config)
    if on_demand:
        weights -= (config.weights_in_depth - 1) * weights_of_block(config)
    if on_demand:
        less = ""
    else:
        less = ", or have them drawn on demand (on_demand=True, --stream)"
    check_fits(weights * dtype.itemsize, f"lower width, depth or context{less}")
    if (
        shape is not None
        and math.prod(shape)
        * (shape[1] * config.heads + config.hidden_width)
        * dtype.itemsize
        * SHARE
        > memory()
    ):
        read = "{:,} sequences of {:,} tokens".format(*shape)
        needed = weights * dtype.itemsize + first_activations(config, *shape, dtype)
        check_fits(
            needed,
            "lower --batch, --context or --width",
            f"the weights and one sublayer's activations for {read} need",
        )
