"""The architecture of a GPT: all its choices, checked when the object is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from ctrans.base.option import (
    COUNT,
    FINITE,
    POSITIVE,
    SEED,
    WEIGHT,
    Range,
    check_options,
    option,
    part_of,
)
from ctrans.dynamics.depth import MOST_BLOCKS, check_count, check_dt
from ctrans.dynamics.fields import (
    ACTIVATIONS,
    ATTENTIONS,
    FFNS,
    QK_NORMS,
    ExpertOptions,
    MapSettings,
)
from ctrans.dynamics.fields.attention import check_temperature, qk_norm_name
from ctrans.dynamics.fields.tables import check_maps, takes, usual_hidden_width
from ctrans.dynamics.norm import NORMS, NormOptions, check_norm, norm_settings
from ctrans.dynamics.placement import (
    PLACEMENTS,
    BlockPlacement,
    Placement,
    arrange,
    placements_in,
    spell_for,
)
from ctrans.dynamics.residual import ALIASES, RESIDUALS, check_image, check_residual, residual_name
from ctrans.dynamics.weights.functions_of_depth import BASES
from ctrans.model.config_checks import (
    FREE,
    check_branch_norms,
    check_depth_weights,
    check_parallel_blocks,
    check_parametrisation,
)
from ctrans.model.initialisation import INITIALISATIONS
from ctrans.model.parametrisation import PARAMETRISATIONS, STANDARD, Parametrisation
from ctrans.model.stack import MOST_STEPS, check_stack
from solvers import ConfigError

MOST_STREAMS = 64
"""The largest number of streams. With more, mixing costs more than the maps."""
KNOTS = 4
"""The default number of knots of weights that are functions of depth."""
DEPTH_WEIGHTS = {FREE: None, **BASES}
"""How weights depend on depth."""
MIXED = "post/pre for attention and FFN, post*3+pre*9 block by block"
"""How to write placements that differ within a model (`ctrans.dynamics.placement.spell`)."""


@dataclass(frozen=True)
class GPTConfig(MapSettings, NormOptions):
    """An architecture. Every field is checked when the object is made: ConfigError names the value
    and the fix.

    A field made with `option` is an option of every command, a setting that ``ctrans screen
    --compare`` varies and a key of study files. Options of attention, experts and norms are those
    of the base classes; an option that the chosen map or norm does not use raises an error.

    - `vocab_size`, `context`: the number of tokens, and the longest sequence
    - `placement`: a name of `PLACEMENTS`; ("post", "pre") for attention and FFN (HybridNorm); or a
      list with one of these for each block (Mix-LN). It is kept as one text, such as "post*3+pre*9"
      (see `ctrans.dynamics.placement.spell`)
    - `ffn_width`: the FFN's features, with `ffn="moe"` those of each expert. None: 4 width; 8/3
      width, rounded up to a multiple of 8, if gated; the features of a token's experts add up to
      those of one plain FFN
    - `causal`: whether a token reads earlier ones only
    - `qk_norm`: False, or a name of `QK_NORMS`; True is "rms"
    - `tied`: whether the head shares the token embedding's weights
    - `alpha`: DeepNorm's (DeepNet, decoder only), for a placement with a residual gain
    - `stack_steps`: None (every sublayer is a segment), or the number of segments of length `dt` in
      which the whole stack of blocks is one velocity with the same weights (OT-Transformer). The
      blocks inside have steps of length 1
    """

    option_group: ClassVar[str] = "Architecture"

    vocab_size: int = 256
    context: int = option(256, "Tokens per sequence.", limits=COUNT, flags="--context --tokens")
    depth: int = option(
        6, "Blocks. Each has an attention and an FFN sublayer.", limits=Range(1, MOST_BLOCKS)
    )
    width: int = option(128, "Width d of a token.", limits=COUNT)
    heads: int = option(4, "Attention heads. They divide the width.", limits=COUNT)
    placement: str = option(
        "peri",
        f"Which norms act where; {MIXED}.",
        group="Norms",
        choices=PLACEMENTS,
        other_choices=True,
    )
    norm: str = option("layernorm", "The norm.", group="Norms", choices=NORMS)
    dt: float = option(1.0, "Residual scale: the length of a segment in depth-time.")
    attention: str = option("softmax", "Attention map.", group="Attention", choices=ATTENTIONS)
    ffn: str = option("mlp", "FFN map.", group="Feed-forward", choices=FFNS)
    ffn_width: int | None = option(
        None,
        "Hidden width of the FFN.",
        group="Feed-forward",
        limits=COUNT,
        default_words="4 width; 8/3 width if gated",
    )
    activation: str = option(
        "gelu", "Activation of the FFN.", group="Feed-forward", choices=ACTIVATIONS
    )
    bias: bool = option(
        default=True, help="Use biases of linear maps and offsets of norms.", group="Weights"
    )
    causal: bool = True
    temperature: float = option(1.0, "Temperature tau of the attention.", group="Attention")
    qk_norm: bool | str = option(
        default=False,
        help="Norm of queries and keys.",
        group="Attention",
        choices=QK_NORMS,
        default_words="none; rms without a name",
    )
    eps: float = option(1e-5, "Constant that a norm adds to the variance.", group="Norms")
    initialisation: str = option(
        "gpt2", "Initial weights.", group="Weights", choices=INITIALISATIONS, flags="--init"
    )
    embedding_std: float = option(
        0.02,
        "Standard deviation of the embeddings. It sets the size of X at depth 0.",
        group="Weights",
        limits=WEIGHT,
    )
    alpha: float | None = option(
        None,
        "Constant of placement deepnorm.",
        group="Residual",
        limits=POSITIVE,
        default_words="(2 depth)^(1/4)",
    )
    depth_weights: str = option(
        FREE,
        "Weights as functions of depth; free: each block has its own.",
        group="Weights",
        choices=DEPTH_WEIGHTS,
    )
    knots: int | None = option(
        None,
        "Number of coefficients of such a function for each parameter.",
        group="Weights",
        limits=Range(1, MOST_BLOCKS),
        default_words=str(KNOTS),
    )
    residual: str = option(
        "plain",
        f"How a sublayer's output joins the state. {', '.join(ALIASES)} are other names for these.",
        group="Residual",
        choices=RESIDUALS,
    )
    residual_init: float | None = option(
        None,
        "Initial value of a residual's gains.",
        group="Residual",
        limits=FINITE,
        default_words="layerscale 0.1, rezero 0, ngpt 0.05",
    )
    parallel_blocks: bool = option(
        default=False,
        help="Attention and FFN of a block act in parallel: X + dt (attention(N X) + FFN(N X)).",
        group="Residual",
    )
    branch_norms: bool = option(
        default=False,
        help="With --parallel-blocks: separate input norms for attention and FFN, as in GPT-NeoX.",
        group="Residual",
    )
    streams: int | None = option(
        None,
        "Number of streams of the state, for hyper_connections and mhc.",
        group="Residual",
        limits=Range(1, MOST_STREAMS),
        default_words="4",
    )
    tied: bool = True
    stack_steps: int | None = option(
        None,
        "Use the whole stack of blocks as one velocity with the same weights at all times"
        " (OT-Transformer), integrated in this many steps of length --dt.",
        group="Residual",
        limits=Range(1, MOST_STEPS),
        default_words="each sublayer is a segment with its own weights",
    )
    parametrisation: str = option(
        STANDARD,
        "How initial weights, dt, logits and rates follow width and depth.",
        group="Weights",
        choices=PARAMETRISATIONS,
    )
    base_width: int | None = option(
        None,
        "Width at which the parametrisation changes nothing.",
        group="Weights",
        limits=COUNT,
        default_words="--width",
    )
    base_depth: int | None = option(
        None,
        "Blocks at which the parametrisation changes nothing.",
        group="Weights",
        limits=COUNT,
        default_words="--depth",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "residual", residual_name(self.residual))
        check_options(self)
        check_count("vocab_size", self.vocab_size)
        check_dt(self.dt)
        object.__setattr__(self, "placement", spell_for(self.placement, self.depth))
        check_parallel_blocks(self)
        # before check_maps: hidden_width needs valid experts, and a temperature that is a tensor
        # has no comparison with the default
        part_of(ExpertOptions, self)
        check_temperature(self.temperature)
        check_maps(self)
        object.__setattr__(self, "qk_norm", qk_norm_name(self.qk_norm))
        check_norm(self.width, self.eps)
        norm_settings(self.norm, self, self.width, self.heads)
        check_branch_norms(self)
        placements = placements_in(self.placement)
        check_residual(self.residual, placements, self.residual_init, self.streams)
        check_image(self.residual, self.norm)
        if self.is_stack:
            has_experts = takes("ffn", self.ffn, "experts")
            check_stack(placements, self.state_streams, experts=has_experts)
        check_depth_weights(self)
        check_parametrisation(self)
        if self.alpha is not None and not self._has_residual_gain:
            raise ConfigError(
                f"alpha = {self.alpha} has no meaning for placement {self.placement!r}: leave it"
                " out, or choose deepnorm"
            )

    @property
    def rules(self) -> Parametrisation:
        """The parametrisation's entry."""
        return PARAMETRISATIONS[self.parametrisation]

    @property
    def times_wider(self) -> float:
        """n = width/base width."""
        return self.width / (self.base_width or self.width)

    @property
    def times_deeper(self) -> float:
        """l = depth/base depth."""
        return self.depth / (self.base_depth or self.depth)

    @property
    def step_length(self) -> float:
        """dt l^branch: the length of a segment after the parametrisation."""
        return float(self.dt * self.times_deeper**self.rules.branch)

    @property
    def is_stack(self) -> bool:
        """Whether the whole stack of blocks is one velocity."""
        return self.stack_steps is not None

    @property
    def hidden_width(self) -> int:
        """The FFN's number of features."""
        if self.ffn_width is not None:
            return self.ffn_width
        return usual_hidden_width(self.width, self.ffn, part_of(ExpertOptions, self))

    @property
    def per_block(self) -> int:
        """How many sublayers a block has: two, or one where attention and FFN act at once."""
        if self.parallel_blocks:
            return 1
        return 2

    @property
    def segments(self) -> int:
        """The number of segments of depth-time: of sublayers, or of steps of the stack."""
        if self.stack_steps is None:
            return self.per_block * self.depth
        return self.stack_steps

    @property
    def placements(self) -> list[BlockPlacement]:
        """The placements of attention and FFN in each block."""
        return arrange(self.placement, self.depth)

    @property
    def sets_of_block_weights(self) -> int:
        """The number of values of each parameter of a block: one for each block, or for each
        knot.
        """
        if self.depth_weights == FREE:
            return self.depth
        return self.knots or KNOTS

    @property
    def residual_start(self) -> float:
        """The initial value of the residual's gains; 0 without gains."""
        if self.residual_init is None:
            return RESIDUALS[self.residual].start or 0.0
        return self.residual_init

    @property
    def state_streams(self) -> int:
        """The number of streams, which are concatenated along the state's last axis."""
        return self.streams or RESIDUALS[self.residual].streams or 1

    def gain_of(self, placement: Placement) -> float:
        """The factor of a sublayer's map: DeepNorm's 1/alpha if the placement has a residual gain,
        else 1.
        """
        if placement.residual_gain:
            return 1 / self._alpha
        return 1.0

    def at_depth(self, blocks: int) -> GPTConfig:
        """The same architecture with another number of blocks over the same depth-time T (for a
        stack, of steps). alpha does not change.

        Raises ConfigError for placements that differ by block, and for residuals that depend on the
        number of blocks.
        """
        check_count("blocks", blocks, MOST_BLOCKS)
        if self.stack_steps is not None:
            dt = float(Fraction(self.dt) * Fraction(self.stack_steps, blocks))
            return replace(self, stack_steps=blocks, dt=dt)
        if blocks != self.depth and "+" in self.placement:
            raise ConfigError(
                f"placement {self.placement!r} is for {self.depth} blocks: the model has no other"
                " depth"
            )
        if blocks != self.depth and RESIDUALS[self.residual].counts_blocks:
            raise ConfigError(
                f"residual {self.residual!r} depends on the number of blocks, here {self.depth}:"
                " the model has no other depth"
            )
        dt = float(Fraction(self.dt) * Fraction(self.depth, blocks))
        dt *= (self.depth / blocks) ** self.rules.branch
        alpha = self._alpha if self._has_residual_gain else None
        return replace(self, depth=blocks, dt=dt, alpha=alpha)

    @property
    def _alpha(self) -> float:
        if self.alpha is None:
            return float((2 * self.depth) ** 0.25)
        return self.alpha

    @property
    def _has_residual_gain(self) -> bool:
        return any(placement.residual_gain for placement in placements_in(self.placement))


def check_seed(seed: object) -> None:
    """Raises ConfigError unless the seed is a whole number from 0 to 2^63 - 1."""
    SEED.check("seed", seed, whole=True)
