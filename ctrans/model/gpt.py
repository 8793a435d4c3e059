"""The language model: embeddings, a `Depth` of attention and FFN sublayers, a final norm where the placement needs one, a tied
head.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctrans.depth import Depth, Sublayers, check_count, check_dt
from ctrans.model.initialisation import get_initialisation, initialise
from ctrans.norm import NORMS, Norm, check_norm
from ctrans.placement import get_placement
from ctrans.sublayer import ACTIVATIONS, Attention, FeedForward, Kind, Sublayer
from ctrans.weights.functions_of_depth import BASES, blocks_through
from ctrans.weights.on_demand import Piece, Shelf, check_fits, put_on_demand, skeletons
from solvers import ConfigError, Solution
from solvers.errors import look_up

TOKEN_TYPES = (torch.int64, torch.int32)
FREE = "free"
"""The `depth_weights` of a model whose blocks have weights of their own."""
KNOTS = 4
"""How many knots weights have that are functions of depth, unless said otherwise."""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """An architecture. Every field is checked when the object is made: ConfigError names the value and the fix.

    `depth` counts blocks, `width` is d, `context` the longest sequence, `dt` the residual scale. `ffn_width` defaults to 4
    width, and `alpha`, which only `deepnorm` uses, to (2 depth)^(1/4) (DeepNet, decoder only). `depth_weights` is "free" (each
    block has its own), or a basis of `ctrans.weights.functions_of_depth.BASES`: blocks then share the coefficients of a function of depth,
    `knots` (4 if None) for every parameter.
    """

    vocab_size: int = 256
    context: int = 256
    depth: int = 6
    width: int = 128
    heads: int = 4
    placement: str = "peri"
    norm: str = "layernorm"
    dt: float = 1.0
    ffn_width: int | None = None
    activation: str = "gelu"
    bias: bool = True
    causal: bool = True
    temperature: float = 1.0
    qk_norm: bool = False
    eps: float = 1e-5
    initialisation: str = "gpt2"
    embedding_std: float = 0.02
    alpha: float | None = None
    depth_weights: str = "free"
    knots: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "depth", "width", "heads"):
            check_count(name, getattr(self, name))
        if self.ffn_width is not None:
            check_count("ffn_width", self.ffn_width)
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} is not divisible by heads {self.heads}: choose heads that divide the width")
        check_dt(self.dt)
        if not 2 * self.depth * self.dt < math.inf:
            raise ConfigError(f"dt = {self.dt:g} times 2 x {self.depth} sublayers is no finite depth-time: lower dt")
        get_placement(self.placement)
        get_initialisation(self.initialisation)
        look_up("norm", self.norm, NORMS)
        look_up("activation", self.activation, ACTIVATIONS)
        check_norm(self.width, self.eps)
        for name in ("bias", "causal", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: give True or False")
        _check_positive("temperature", self.temperature)
        _check_positive("embedding_std", self.embedding_std)
        look_up("depth_weights", self.depth_weights, {FREE: None, **BASES})
        if self.knots is not None:
            check_count("knots", self.knots)
            if self.depth_weights == FREE:
                raise ConfigError(
                    f"knots = {self.knots} has no meaning for free weights: leave it out, or choose depth_weights "
                    f"{', '.join(sorted(BASES))}"
                )
        if self.alpha is not None:
            _check_positive("alpha", self.alpha)
            if not get_placement(self.placement).residual_gain:
                raise ConfigError(
                    f"alpha = {self.alpha} has no meaning for placement {self.placement!r}: leave it out, or choose deepnorm"
                )

    @property
    def parameters(self) -> int:
        """The number of entries of the weight matrices: embeddings, and per block 4 d^2 of attention and 2 d d_ff of FFN."""
        return (self.vocab_size + self.context) * self.width + self.weights_in_depth * self.parameters_of_block

    @property
    def parameters_of_block(self) -> int:
        """Of these, those of one block."""
        return 4 * self.width**2 + 2 * self.width * (self.ffn_width or 4 * self.width)

    @property
    def weights_in_depth(self) -> int:
        """How many values every parameter of a block has: one for each block, or for each knot."""
        return self.depth if self.depth_weights == FREE else self.knots or KNOTS

    @property
    def gain(self) -> float:
        """What every sublayer's map is multiplied by: 1, or 1/alpha for DeepNorm."""
        return 1.0 if self._alpha is None else 1 / self._alpha

    def at_depth(self, blocks: int) -> GPTConfig:
        """The same architecture over the same depth-time T in another number of blocks; alpha stays what it was."""
        check_count("blocks", blocks)
        dt = float(Fraction(self.dt) * Fraction(self.depth, blocks))
        return dataclasses.replace(self, depth=blocks, dt=dt, alpha=self._alpha)

    @property
    def _alpha(self) -> float | None:
        if not get_placement(self.placement).residual_gain:
            return None
        return (2 * self.depth) ** 0.25 if self.alpha is None else self.alpha


class GPT(nn.Module):
    """A decoder-only Transformer of any placement and dt: logits = head(N_final(depth(embed(tokens)))), weights drawn from
    `seed`.

    Positions are learned; the head shares the token embedding's weights. `model.depth` is the `Depth`. With `on_demand`, each
    attention's and FFN's weights are drawn when they are used and dropped when the next one's are: the same weights, in the memory
    of one sublayer (see `ctrans.weights.on_demand`).
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0, on_demand: bool = False):
        super().__init__()
        check_buildable(config, seed, on_demand=on_demand)
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for embedding in (self.token_embedding, self.position_embedding):
                embedding.weight.normal_(0.0, config.embedding_std, generator=generator)
        self.depth = (drawn_depth if on_demand else make_depth)(config, generator)
        self.final_norm = make_norm(config) if get_placement(config.placement).final_norm else nn.Identity()

    def forward(
        self, tokens: Int[Tensor, "*batch tokens"], targets: Int[Tensor, "*batch tokens"] | None = None
    ) -> tuple[Float[Tensor, "*batch tokens vocab"], Float[Tensor, ""] | None]:
        """The logits of every next token, and with `targets` their mean cross-entropy in nats (targets of -1 are left out)."""
        logits = self.head(self.depth(self.embed(tokens)))
        if targets is None:
            return logits, None
        if targets.shape != tokens.shape:
            raise ConfigError(
                f"targets have shape {tuple(targets.shape)} and tokens {tuple(tokens.shape)}: give one target per token"
            )
        self._check_range("targets", targets[targets != -1])
        return logits, F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)

    def embed(self, tokens: Int[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens width"]:
        """X_0: token plus position embeddings. Raises ConfigError for sequences longer than the context or unknown tokens."""
        if not isinstance(tokens, Tensor) or tokens.dtype not in TOKEN_TYPES or tokens.dim() == 0:
            what = f"{tuple(tokens.shape)} of {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ConfigError(f"the tokens are {what}: give a tensor of int64 or int32 of shape (*batch, tokens)")
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ConfigError(f"{length} tokens exceed the context of {self.config.context}: shorten the text or raise context")
        self._check_range("tokens", tokens)
        positions = torch.arange(length, device=tokens.device)
        return self.token_embedding(tokens) + self.position_embedding(positions)

    def head(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens vocab"]:
        """Logits of the final hidden state."""
        return F.linear(self.final_norm(x), self.token_embedding.weight)

    def trajectory(self, tokens: Int[Tensor, "*batch tokens"], **options: Any) -> Solution:
        """X at depth-time 0 and at every segment's end, 2 depth + 1 states, from X_0 = embed(tokens): `Depth.trajectory`, whose
        options (`method`, `steps`, `rtol`, `atol`, `gradient`, ...) and errors it has.
        """
        return self.depth.trajectory(self.embed(tokens), **options)

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
    return NORMS[config.norm](config.width, config.eps, bias=config.bias and config.norm == "layernorm")


def make_sublayer(config: GPTConfig, kind: Kind) -> Sublayer:
    """A fresh sublayer of that kind with the norms that the configuration's placement puts around it."""
    placement = get_placement(config.placement)
    return Sublayer(
        FIELDS[kind](config),
        kind,
        input_norm=make_norm(config) if placement.input_norm else None,
        output_norm=make_norm(config) if placement.output_norm else None,
        state_norm=make_norm(config) if placement.state_norm else None,
        gain=config.gain,
    )


def make_depth(config: GPTConfig, generator: torch.Generator) -> Depth:
    """The configuration's blocks, their weights drawn: free, or at the knots of functions of depth."""
    blocks = [Sublayers(make_sublayer(config, kind) for kind in FIELDS) for _ in range(config.weights_in_depth)]
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
        parts = [make_sublayer(config, kind) for _ in range(config.depth) for kind in FIELDS]
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
        with skeletons():
            part = make_sublayer(self.config, list(FIELDS)[k % len(FIELDS)])
        part.field.to_empty(device="cpu")
        initialise([part], self.config.initialisation, generator, blocks=self.config.depth)
        if k + 1 == len(self.states):
            self.states.append(generator.get_state())
        return {name: parameter.detach() for name, parameter in part.field.named_parameters()}


def _attention(config: GPTConfig) -> Attention:
    return Attention(
        config.width,
        config.heads,
        causal=config.causal,
        temperature=config.temperature,
        qk_norm=config.qk_norm,
        bias=config.bias,
        eps=config.eps,
    )


def _feed_forward(config: GPTConfig) -> FeedForward:
    return FeedForward(config.width, config.ffn_width or 4 * config.width, activation=config.activation, bias=config.bias)


# A block is these, in this order.
FIELDS: dict[Kind, Callable[[GPTConfig], nn.Module]] = {"attention": _attention, "ffn": _feed_forward}


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name} = {value!r}: give a positive finite number")


def check_seed(seed: object) -> None:
    """Raises ConfigError unless it is a whole number that a generator takes."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed!r}: give a whole number from 0 to 2^63 - 1")


def check_buildable(config: GPTConfig, seed: int, *, on_demand: bool = False) -> None:
    """Raises ConfigError for a seed that is none, or weights that this machine cannot hold: before it starts to swap."""
    check_seed(seed)
    weights = config.parameters
    if on_demand:
        weights -= (config.weights_in_depth - 1) * config.parameters_of_block
    less = "" if on_demand else ", or have them drawn on demand (on_demand=True, --stream)"
    check_fits(weights * torch.get_default_dtype().itemsize, f"lower width, depth or context{less}")
