"""The language model: embeddings, a `Depth` of attention and FFN sublayers, a final norm where the placement needs one, a head,
tied or not.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctrans.depth import Depth, Sublayers
from ctrans.fields import FIELDS, Kind
from ctrans.fields.positions import POSITIONS, Positions
from ctrans.model.config import FREE, GPTConfig, check_seed
from ctrans.model.initialisation import initialise
from ctrans.norm import NORMS, Norm
from ctrans.placement import BlockPlacement, Placement
from ctrans.scheme import trajectory
from ctrans.sublayer import Sublayer
from ctrans.weights.functions_of_depth import blocks_through
from ctrans.weights.on_demand import Piece, Shelf, check_fits, put_on_demand, skeletons
from solvers import ConfigError, Solution

TOKEN_TYPES = (torch.int64, torch.int32)


class GPT(nn.Module):
    """A decoder-only Transformer of any placement and dt: logits = head(N_final(depth(embed(tokens)))), weights drawn from
    `seed`.

    Positions are known as `config.positions` says; the head shares the token embedding's weights unless `config.tied` is False.
    `model.depth` is the `Depth`. With `on_demand`, each attention's and FFN's weights are drawn when they are used and dropped when
    the next one's are: the same weights, in the memory of one sublayer (see `ctrans.weights.on_demand`).
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0, on_demand: bool = False):
        super().__init__()
        check_buildable(config, seed, on_demand=on_demand)
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width) if places(config).embedding else None
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for embedding in (self.token_embedding, self.position_embedding):
                if embedding is not None:
                    embedding.weight.normal_(0.0, config.embedding_std, generator=generator)
        self.unembedding = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self.depth = (drawn_depth if on_demand else make_depth)(config, generator)
        last = config.placements[-1].ffn
        self.final_norm = make_norm(config) if last.final_norm else nn.Identity()
        if self.unembedding is not None:
            nn.init.normal_(self.unembedding.weight, 0.0, config.embedding_std, generator=generator)

    def forward(
        self, tokens: Int[Tensor, "*batch tokens"], targets: Int[Tensor, "*batch tokens"] | None = None
    ) -> tuple[Float[Tensor, "*batch tokens vocab"], Float[Tensor, ""] | None]:
        """The logits of every next token, and with `targets` their mean cross-entropy in nats (targets of -1 are left out)."""
        logits = self.head(self.depth(self.embed(tokens)))
        return logits, None if targets is None else self.loss(logits, tokens, targets)

    def loss(self, logits: Tensor, tokens: Tensor, targets: Tensor) -> Float[Tensor, ""]:
        """Their mean cross-entropy in nats over all targets but -1. Raises ConfigError where there is none, or tokens are unknown."""
        if targets.dtype != torch.int64:
            raise ConfigError(f"the targets are of {targets.dtype}: give a tensor of int64, as the tokens' shape")
        if targets.shape != tokens.shape:
            raise ConfigError(
                f"targets have shape {tuple(targets.shape)} and tokens {tuple(tokens.shape)}: give one target per token"
            )
        known = targets[targets != -1]
        if targets.device.type == "cpu" and not known.numel():
            raise ConfigError(
                f"all {targets.numel()} targets are -1, so there is no loss: give at least one token to predict, or no targets"
            )
        self._check_range("targets", known)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)

    def embed(self, tokens: Int[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens width"]:
        """X_0: token embeddings, plus those of positions where these are learned.

        Raises ConfigError for sequences longer than the context or unknown tokens.
        """
        if not isinstance(tokens, Tensor) or tokens.dtype not in TOKEN_TYPES or tokens.dim() == 0:
            what = f"{tuple(tokens.shape)} of {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ConfigError(f"the tokens are {what}: give a tensor of int64 or int32 of shape (*batch, tokens)")
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ConfigError(f"{length} tokens exceed the context of {self.config.context}: shorten the text or raise context")
        self._check_range("tokens", tokens)
        x0: Tensor = self.token_embedding(tokens)
        if self.position_embedding is None:
            return x0
        places: Tensor = self.position_embedding(torch.arange(length, device=tokens.device))
        return x0 + places

    def head(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens vocab"]:
        """Logits of the final hidden state."""
        return F.linear(self.final_norm(x), (self.token_embedding if self.unembedding is None else self.unembedding).weight)

    def trajectory(self, tokens: Int[Tensor, "*batch tokens"], **options: Any) -> Solution:
        """X at depth-time 0 and at every segment's end, 2 depth + 1 states, from X_0 = embed(tokens): `ctrans.scheme.trajectory`, whose
        options (`method`, `steps`, `rtol`, `atol`, `gradient`, ...) and errors it has.
        """
        return trajectory(self.depth, self.embed(tokens), **options)

    def at_depth(self, blocks: int, weights: str = "linear") -> GPT:
        """A copy of this model over the same depth-time T in another number of blocks, dt = T/(2 blocks).

        Weights are `Depth.resample`'s: free ones interpolated as `weights` says, functions of depth evaluated at the new blocks.
        Raises ConfigError for a number of blocks below 1 or an interpolation that is none.
        """
        config = self.config.at_depth(blocks)
        model = copy.deepcopy(self, {id(self.depth): self.depth.resample(blocks, weights)})
        model.config = config
        return model

    def _check_range(self, what: str, ids: Tensor) -> None:
        # on an accelerator this check would wait for the device; there the embedding's own assertion reports it
        if ids.device.type == "cpu" and ids.numel():
            lowest, highest = int(ids.min()), int(ids.max())
            if lowest < 0 or highest >= self.config.vocab_size:
                raise ConfigError(f"{what} run from {lowest} to {highest}, the vocabulary from 0 to {self.config.vocab_size - 1}")


def make_norm(config: GPTConfig) -> Norm:
    """A fresh norm of the configuration's kind; LayerNorm without offset where the model has no biases."""
    kind = NORMS[config.norm]
    return kind(config.width, config.eps, bias=config.bias and getattr(kind, "has_offset", False))


def make_sublayer(config: GPTConfig, kind: Kind, placement: Placement) -> Sublayer:
    """A fresh sublayer of that kind with the norms that the placement puts around its map."""
    table = FIELDS[kind]
    return Sublayer(
        table[getattr(config, kind)](config),
        kind,
        input_norm=make_norm(config) if placement.input_norm else None,
        output_norm=make_norm(config) if placement.output_norm else None,
        state_norm=make_norm(config) if placement.state_norm else None,
        gain=config.gain_of(placement),
        placement=placement,
    )


def make_block(config: GPTConfig, placements: BlockPlacement) -> Sublayers:
    """A block's sublayers, one of each kind."""
    return Sublayers(make_sublayer(config, kind, placement) for kind, placement in zip(FIELDS, placements, strict=True))


def make_depth(config: GPTConfig, generator: torch.Generator) -> Depth:
    """The configuration's blocks, their weights drawn: free, or at the knots of functions of depth.

    Raises ConfigError for placements that differ by block where the weights are functions of depth.
    """
    if config.depth_weights != FREE and "+" in config.placement:
        raise ConfigError(f"weights that are functions of depth need blocks of one placement, not {config.placement!r}")
    placements = config.placements if config.depth_weights == FREE else config.placements[:1] * config.weights_in_depth
    blocks = [make_block(config, each) for each in placements]
    initialise([part for block in blocks for part in block], config.initialisation, generator, blocks=config.depth)
    if config.depth_weights != FREE:
        blocks = blocks_through(blocks, config.depth_weights, config.depth)
    return Depth([part for block in blocks for part in block], config.dt)


def drawn_depth(config: GPTConfig, generator: torch.Generator) -> Depth:
    """`make_depth`, each map's weights drawn on demand. Raises ConfigError for weights that are functions of depth."""
    if config.depth_weights != FREE:
        raise ConfigError(
            f"depth_weights = {config.depth_weights!r} are few enough to keep: on demand, only free weights are made"
        )
    draws, shelf = _Draws(config, generator), Shelf()
    with skeletons():
        parts = [part for placements in config.placements for part in make_block(config, placements)]
    for k, part in enumerate(parts):
        put_on_demand(part.field, Piece(f"segment {k}", partial(draws.weights, k)), shelf)
    return Depth(parts, config.dt)


class _Draws:
    """The depth's maps in the order in which `make_depth` draws them, each from the generator's state where it begins.

    States are known as far as has been drawn; a map beyond is reached by drawing those before it.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator):
        self.config, self.states = config, [generator.get_state()]

    def weights(self, k: int) -> dict[str, Tensor]:
        while len(self.states) <= k:
            self._draw(len(self.states) - 1)
        return self._draw(k)

    def _draw(self, k: int) -> dict[str, Tensor]:
        generator = torch.Generator()
        generator.set_state(self.states[k])
        block, kind = divmod(k, len(FIELDS))
        with skeletons():
            part = make_block(self.config, self.config.placements[block])[kind]
        part.field.to_empty(device="cpu")
        initialise([part], self.config.initialisation, generator, blocks=self.config.depth)
        if k + 1 == len(self.states):
            self.states.append(generator.get_state())
        return {name: parameter.detach() for name, parameter in part.field.named_parameters()}


def number_of_weights(config: GPTConfig) -> int:
    """The number of entries of all weight matrices: embeddings, and those of every block."""
    embedded = config.vocab_size * (1 if config.tied else 2) + (config.context if places(config).embedding else 0)
    return embedded * config.width + config.weights_in_depth * weights_of_block(config)


def places(config: GPTConfig) -> Positions:
    """How the model knows the places of tokens."""
    return POSITIONS[config.positions]


def weights_of_block(config: GPTConfig) -> int:
    """Of these, those of one block."""
    try:
        with torch.device("meta"):
            maps = [table[getattr(config, kind)](config) for kind, table in FIELDS.items()]
    except RuntimeError:  # a matrix of more bytes than an address can count
        return sys.maxsize
    return sum(weight.numel() for made in maps for weight in made.parameters() if weight.dim() > 1)


def check_buildable(config: GPTConfig, seed: int, *, on_demand: bool = False) -> None:
    """Raises ConfigError for a seed that is none, or weights that this machine cannot hold: before it starts to swap."""
    check_seed(seed)
    weights = number_of_weights(config)
    if on_demand:
        weights -= (config.weights_in_depth - 1) * weights_of_block(config)
    less = "" if on_demand else ", or have them drawn on demand (on_demand=True, --stream)"
    check_fits(weights * torch.get_default_dtype().itemsize, f"lower width, depth or context{less}")
