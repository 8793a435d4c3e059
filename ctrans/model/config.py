"""An architecture: every choice that makes a GPT, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from ctrans.depth import check_count, check_dt
from ctrans.fields import ACTIVATIONS, ExpertOptions
from ctrans.fields.attention import check_temperature, qk_norm_name
from ctrans.fields.attention_options import ROTARY_BASE
from ctrans.fields.tables import check_maps, takes, usual_hidden_width
from ctrans.model.initialisation import get_initialisation
from ctrans.model.stack import MOST_STEPS, check_stack
from ctrans.norm import NORMS, WITHOUT_GAINS, check_norm, norm_settings
from ctrans.placement import BlockPlacement, Placement, arrange, placements_in, spell_for
from ctrans.residual import RESIDUALS, check_image, check_residual, residual_name
from ctrans.weights.functions_of_depth import BASES
from solvers import ConfigError
from solvers.errors import look_up

FREE = "free"
"""The `depth_weights` of a model whose blocks have weights of their own."""
MOST_BLOCKS = 10_000
"""Blocks of a model: ten times those of the deepest that was trained."""
MOST_STREAMS = 64
"""Streams of a state: beyond these the mixing costs more than the maps."""
KNOTS = 4
"""How many knots weights have that are functions of depth, unless said otherwise."""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """An architecture. Every field is checked when the object is made: ConfigError names the value and the fix.

    - `vocab_size`, `context`: how many tokens there are, and the longest sequence of them
    - `depth`, `width`, `heads`: the number of blocks, d, and the attention heads, which divide it
    - `placement`: a name of `PLACEMENTS`; ("post", "pre") for attention and FFN (HybridNorm); or a list with one of these for each
      block (Mix-LN). It is kept as one text, as "post*3+pre*9" (see `ctrans.placement.spell`)
    - `norm`, `eps`: a name of `NORMS`, and what its variance is added to
    - `norm_groups`, `norm_alpha`, `norm_radius`: see `ctrans.norm.NormOptions`; groups are the heads if None; one that the norm has no
      use for is refused
    - `dt`: the residual scale, the length of a segment in depth-time
    - `attention`, `ffn`: names of `ATTENTIONS` and `FFNS`
    - `ffn_width`, `activation`: the FFN's features (if None 4 width, of gated ones 8/3 width, up to a multiple of 8), and phi, a name
      of `ACTIVATIONS`
    - `bias`: whether linear maps and LayerNorms have one
    - `causal`, `temperature`, `qk_norm`: of attention: whether tokens read earlier ones only, tau, the norm of queries and keys, a
      name of `QK_NORMS` (True is "rms")
    - `positions`, `rotary_base`, `rotary_fraction`, `kv_heads`, `window`, `softcap`, `sinks`, `gated_output`: see
      `ctrans.fields.AttentionOptions`; an option that the attention has no use for is refused
    - `tied`: whether the head shares the token embedding's weights, or has its own
    - `experts`, `top_k`, `shared_experts`, `router`, `expert`: of ffn "moe", see `ctrans.fields.ExpertOptions`; `ffn_width` is then
      each expert's (if None, so that a token's experts together have as many features as one plain FFN)
    - `initialisation`, `embedding_std`: a name of `INITIALISATIONS`, and the standard deviation of the embeddings' entries
    - `alpha`: DeepNorm's, (2 depth)^(1/4) if None (DeepNet, decoder only); only where a placement has a residual gain
    - `residual`, `residual_init`: how a sublayer's output joins the state, a name of `RESIDUALS`, and what its gains begin at (its
      entry's own if None)
    - `streams`: of how many copies of the width the state is, for hyper-connections (4 if None)
    - `parallel_blocks`: whether a block is one segment of attention and FFN at once, X + dt (attention(N X) + FFN(N X)), and not two
    - `branch_norms`: whether the two have an input norm each there, as GPT-NeoX has them, and not one
    - `depth_weights`, `knots`: "free" (each block has its own), or a basis of `BASES`: blocks then share the coefficients of a
      function of depth, `knots` (4 if None) for every parameter
    - `stack_steps`: None (every sublayer is a segment), or over how many segments of length `dt` the whole stack of blocks is one velocity
      with the same weights (the OT-Transformer); the blocks inside have steps of length 1
    """

    vocab_size: int = 256
    context: int = 256
    depth: int = 6
    width: int = 128
    heads: int = 4
    placement: str = "peri"
    norm: str = "layernorm"
    dt: float = 1.0
    attention: str = "softmax"
    ffn: str = "mlp"
    ffn_width: int | None = None
    activation: str = "gelu"
    bias: bool = True
    causal: bool = True
    temperature: float = 1.0
    qk_norm: bool | str = False
    eps: float = 1e-5
    initialisation: str = "gpt2"
    embedding_std: float = 0.02
    alpha: float | None = None
    depth_weights: str = "free"
    knots: int | None = None
    positions: str = "learned"
    rotary_base: float = ROTARY_BASE
    rotary_fraction: float = 1.0
    kv_heads: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    gated_output: bool = False
    residual: str = "plain"
    residual_init: float | None = None
    parallel_blocks: bool = False
    branch_norms: bool = False
    streams: int | None = None
    tied: bool = True
    experts: int = 8
    top_k: int = 2
    shared_experts: int = 0
    router: str = "topk_softmax"
    expert: str = "mlp"
    norm_groups: int | None = None
    norm_alpha: float | None = None
    norm_radius: float | None = None
    stack_steps: int | None = None

    def __post_init__(self) -> None:
        check_count("depth", self.depth, MOST_BLOCKS)
        for name in ("vocab_size", "context", "width", "heads"):
            check_count(name, getattr(self, name))
        if self.ffn_width is not None:
            check_count("ffn_width", self.ffn_width)
        if self.stack_steps is not None:
            check_count("stack_steps", self.stack_steps, MOST_STEPS)
        check_dt(self.dt)
        if not self.segments * self.dt < math.inf:
            raise ConfigError(f"dt = {self.dt:g} times {self.segments} sublayers is no finite depth-time: lower dt")
        object.__setattr__(self, "placement", spell_for(self.placement, self.depth))
        if (
            self.parallel_blocks
            and (mixed := next((pair for pair in self.placements if pair.attention != pair.ffn), None)) is not None
        ):
            raise ConfigError(
                f"placement {mixed.attention.name}/{mixed.ffn.name} is of two sublayers and parallel blocks have one: choose one of them"
            )
        get_initialisation(self.initialisation)
        look_up("norm", self.norm, NORMS)
        look_up("activation", self.activation, ACTIVATIONS)
        ExpertOptions.of(self)
        check_maps(self)
        object.__setattr__(self, "qk_norm", qk_norm_name(self.qk_norm))
        check_norm(self.width, self.eps)
        norm_settings(self.norm, self, self.width, self.heads)
        for name in ("bias", "causal", "parallel_blocks", "branch_norms", "tied"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: give True or False")
        self._check_branch_norms()
        check_temperature(self.temperature)
        _check_positive("embedding_std", self.embedding_std)
        look_up("depth_weights", self.depth_weights, {FREE: None, **BASES})
        if self.knots is not None:
            check_count("knots", self.knots, MOST_BLOCKS)
            if self.depth_weights == FREE:
                raise ConfigError(
                    f"knots = {self.knots} has no meaning for free weights: leave it out, or choose depth_weights "
                    f"{', '.join(sorted(BASES))}"
                )
        object.__setattr__(self, "residual", residual_name(self.residual))
        if self.streams is not None:
            check_count("streams", self.streams, MOST_STREAMS)
        if self.residual_init is not None:
            _check_finite("residual_init", self.residual_init)
        check_residual(self.residual, placements_in(self.placement), self.residual_init, self.streams)
        check_image(self.residual, self.norm)
        if self.stack_steps is not None:
            check_stack(placements_in(self.placement), self.state_streams, takes("ffn", self.ffn, "experts"))
        if self.depth_weights != FREE and RESIDUALS[self.residual].counts_blocks:
            raise ConfigError(
                f"residual {self.residual!r} counts blocks and weights that are functions of depth do not: choose depth_weights {FREE}"
            )
        if self.depth_weights != FREE and RESIDUALS[self.residual].unit_weights:
            raise ConfigError(f"residual {self.residual!r} puts every matrix on a sphere by itself: choose depth_weights {FREE}")
        if self.alpha is not None:
            _check_positive("alpha", self.alpha)
            if not self._has_residual_gain:
                raise ConfigError(
                    f"alpha = {self.alpha} has no meaning for placement {self.placement!r}: leave it out, or choose deepnorm"
                )

    @property
    def hidden_width(self) -> int:
        """The FFN's number of features."""
        return self.ffn_width or usual_hidden_width(self.width, self.ffn, ExpertOptions.of(self))

    @property
    def per_block(self) -> int:
        """How many sublayers a block has: two, or one where attention and FFN act at once."""
        return 1 if self.parallel_blocks else 2

    @property
    def segments(self) -> int:
        """The number of segments of depth-time: of sublayers, or of steps over the stack."""
        return self.per_block * self.depth if self.stack_steps is None else self.stack_steps

    @property
    def placements(self) -> list[BlockPlacement]:
        """The placements of every block's attention and FFN."""
        return arrange(self.placement, self.depth)

    @property
    def weights_in_depth(self) -> int:
        """How many values every parameter of a block has: one for each block, or for each knot."""
        return self.depth if self.depth_weights == FREE else self.knots or KNOTS

    @property
    def residual_start(self) -> float:
        """What the residual's gains begin at; 0 where it has none."""
        return (RESIDUALS[self.residual].start or 0.0) if self.residual_init is None else self.residual_init

    @property
    def state_streams(self) -> int:
        """Of how many streams the state is, side by side in its last axis."""
        return self.streams or RESIDUALS[self.residual].streams or 1

    def gain_of(self, placement: Placement) -> float:
        """What a sublayer's map is multiplied by: 1, or DeepNorm's 1/alpha where the placement has a residual gain."""
        return 1 / self._alpha if placement.residual_gain else 1.0

    def at_depth(self, blocks: int) -> GPTConfig:
        """The same architecture over the same depth-time T in another number of blocks, or of steps over a stack; alpha stays what it
        was.

        Raises ConfigError for placements that differ by block and residuals that count blocks, which say nothing of another number.
        """
        check_count("blocks", blocks, MOST_BLOCKS)
        if self.stack_steps is not None:
            dt = float(Fraction(self.dt) * Fraction(self.stack_steps, blocks))
            return dataclasses.replace(self, stack_steps=blocks, dt=dt)
        if blocks != self.depth and "+" in self.placement:
            raise ConfigError(f"placement {self.placement!r} is of {self.depth} blocks: it has no other depth")
        if blocks != self.depth and RESIDUALS[self.residual].counts_blocks:
            raise ConfigError(f"residual {self.residual!r} counts blocks, here {self.depth}: it has no other depth")
        dt = float(Fraction(self.dt) * Fraction(self.depth, blocks))
        alpha = self._alpha if self._has_residual_gain else None
        return dataclasses.replace(self, depth=blocks, dt=dt, alpha=alpha)

    def _check_branch_norms(self) -> None:
        if not self.branch_norms:
            return
        if not self.parallel_blocks:
            raise ConfigError(
                "branch_norms = True has no meaning for blocks of two sublayers: leave it out, or choose parallel_blocks"
            )
        if self.norm not in WITHOUT_GAINS:
            raise ConfigError(
                f"branch_norms = True needs a norm with gains by channel over one x_hat, and {self.norm!r} is none: choose norm "
                f"{', '.join(WITHOUT_GAINS)}"
            )
        if odd := next((p.name for p in placements_in(self.placement) if not p.input_norm), None):
            raise ConfigError(f"branch_norms = True with placement {odd!r}, which has no input norm: leave it out, or choose pre")

    @property
    def _alpha(self) -> float:
        return (2 * self.depth) ** 0.25 if self.alpha is None else self.alpha

    @property
    def _has_residual_gain(self) -> bool:
        return any(placement.residual_gain for placement in placements_in(self.placement))


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name} = {value!r}: give a positive finite number")


def _check_finite(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} = {value!r}: give a finite number")


def check_seed(seed: object) -> None:
    """Raises ConfigError unless it is a whole number that a generator takes."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed!r}: give a whole number from 0 to 2^63 - 1")
