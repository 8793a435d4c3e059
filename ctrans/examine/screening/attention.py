"""The screening's steps on attention sensitivity (Emadi) and the theory of initialisation (Xiong,
Kim).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ctrans.base.option import part_of
from ctrans.dynamics.depth import Depth, spread
from ctrans.dynamics.fields import AttentionOptions
from ctrans.examine.screening.case import Case, StepPlan, StepVerdict, largest, three
from ctrans.examine.screening.screening_checks import judged
from ctrans.measure.attention.by_depth import (
    AttentionByDepth,
    AttentionLayer,
    BlockBoundsByDepth,
    BlockLayer,
    sensitivity_growth,
)
from ctrans.measure.initialisation.theory import SLOPES, LastLayer, gains, last_layer_bound
from ctrans.measure.measured import Value
from ctrans.measure.walk import Attempt, Described, Instrument, StepContext, StepContextBack
from ctrans.measure.walk.instrument import of_text
from ctrans.model.config import GPTConfig
from ctrans.model.initialisation import get_initialisation
from ctrans.model.parametrisation import STANDARD
from solvers import ConfigError, SolveError
from solvers.run import finite


@dataclass(frozen=True)
class AttentionStep:
    """Attention layers and blocks by depth, and the growth of log S from the first to the last
    layer by its parts.
    """

    layers: list[AttentionLayer]
    blocks: list[BlockLayer]
    growth: dict[str, float]

    def values(self, model: str) -> Iterator[Value]:
        """The rows of the gain through the attention rows by layer."""
        for layer in self.layers:
            if layer.path is not None:
                yield Value(model, "attention's rows alone", layer.path, depth=layer.index)


def plan_attention(case: Case) -> StepPlan:
    """Gain along the attention path, theta, theorem 5.1 and the block bounds 5.2 and 5.3 by layer
    (theory, section 9).

    Quantities: the largest gain of a relative change along a layer's attention path, for the worst
    of several sequences; the least entropy of a head's rows over all layers and the whole text.
    """
    depth = case.model.depth
    layers_of_model = [
        k for k, sublayer in enumerate(depth.sublayers) if sublayer.attention is not None
    ]
    chosen = [layers_of_model[i] for i in spread(len(layers_of_model), case.effort.layers)]
    attention = AttentionByDepth(chosen, seed=case.seed, tolerance=case.effort.tolerance)
    missing: dict[str, str] = {}
    blocks = Attempt(
        BlockBoundsByDepth(spread(depth.blocks, case.effort.blocks), seed=case.seed),
        missing,
        "Lipschitz constants of blocks",
    )

    def conclude() -> StepVerdict:
        layers = [layer for layer in attention.figures() if layer.finite]
        if not layers_of_model:
            raise ConfigError("no attention of this model was recognised")
        if not chosen:
            raise ConfigError("no attention layer was chosen to be measured")
        if not layers:
            raise ConfigError(
                "states are finite at no attention sublayer, so there are no figures of attention"
            )
        growth = sensitivity_growth(layers)
        result = AttentionStep(layers, blocks.figures() or [], growth)
        gain = largest([layer.path for layer in layers])
        theta = max(max(layer.theta_max) for layer in layers)
        bound = largest([layer.ratio for layer in layers])
        refusals = [layer.note for layer in layers if layer.note]
        if refusals:
            about_bound = refusals[0]
        else:
            about_bound = f"theorem 5.1 allows up to {three(bound)} times what is measured"
        segments = "segment"
        if len(layers) > 1:
            segments = "segments"
        places = ", ".join(str(layer.index) for layer in layers)
        worst = ""
        for layer in layers:
            if layer.path == gain:
                worst = f", most in segment {layer.index}"
                break
        readings = case.examination.whole["heads"].figures() or {}
        entropies = readings.get("least entropy of a head", [])
        least = min((reading.value for reading in entropies), default=math.nan)
        layers_with_rows = str(len(entropies))
        if len(entropies) == len(layers_of_model):
            layers_with_rows = "all"
        why = (
            f"in the {len(layers)} measured of {len(layers_of_model)} attention layers"
            f" ({segments} {places}) a relative change of the state grows"
            f" {three(gain)} times at most through the attention rows alone{worst}, theta is at"
            f" most {theta:.3g}, and {about_bound}; the most saturated head of {layers_with_rows}"
            f" layers has rows of {three(least)} nats"
        )
        quantities = {"attention path": gain, "least entropy of a head": least}
        return StepVerdict(
            judged(quantities, "held"),
            f"path {three(gain)}",
            why,
            quantities,
            result=result,
            missing=missing,
        )

    return StepPlan({"several": [attention, blocks]}, conclude)


@dataclass(frozen=True)
class InitialisationStep:
    """Kim's bound on the last layer's gradient at the current weights, and Xiong's statements about
    freshly drawn weights.

    `low` and `high` bound what `pre` adds to E|x|^2/d over the depth, for ReLU without biases.
    `added` is what this model adds on this text. `slope` is d log|dL/dW_2|/d log depth in Xiong's
    setting: Xavier weights, dt = 1. Xiong's figures are None for other architectures and for
    weights of unknown origin; `lacks` names the missing premise.
    """

    low: float | None
    high: float | None
    added: float
    slope: float | None
    last: LastLayer
    lacks: str


EXACT = 1e-4
"""Relative excess over the bound that counts as float32 rounding. The bound is attained, for
example with one token.
"""


class LastLayerGradient(Instrument):
    """Kim's bound on the gradient of the last sublayer's last matrix, at its input state and
    dL/dX_T. `added` is what all sublayers add to mean |x|^2/d.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._last = len(depth.sublayers) - 1
        self._start = _mean_square(of_text(x0, self.kept))
        self.added = math.nan

    def forward(self, at: StepContext) -> None:
        if at.k == self._last:
            self.added = _mean_square(of_text(at.y, self.kept)) - self._start

    def backward(self, at: StepContextBack) -> None:
        if at.k == self._last:
            if not (finite(at.x) and finite(at.p)):
                raise SolveError(
                    "the state or the costate of the last layer is not finite: take smaller weights"
                    " or a smaller dt"
                )
            self.found = last_layer_bound(at.sublayer, at.h, at.x, at.p)


def plan_initialisation(case: Case) -> StepPlan:
    """Kim's proposition 3.1 at the current weights, and Xiong's lemma 2 and theorem 1 for freshly
    drawn weights, if they apply (theory, section 10). It has no quantities.
    """
    config = case.model.config
    lacks = ""
    if not isinstance(config, GPTConfig):
        lacks = (
            "weights freshly drawn with mean 0 and known variances, which ctrans knows for its own"
            " GPTs only"
        )
    elif case.trained:
        lacks = "weights freshly drawn with mean 0 and known variances, and these may be trained"
    last = LastLayerGradient()
    return StepPlan({"part": [last]}, lambda: _conclude_initialisation(config, last, lacks))


def _conclude_initialisation(
    config: Described, gradient: LastLayerGradient, lacks: str
) -> StepVerdict:
    last: LastLayer = gradient.figures()
    low: float | None = None
    high: float | None = None
    slope: float | None = None
    if isinstance(config, GPTConfig) and not lacks:
        low, high = _growth(config)
        xavier = get_initialisation(config.initialisation).of_xavier and config.dt == 1
        if _of_the_papers(config) and xavier:
            slope = SLOPES.get(config.placement)
        if low is None and slope is None:
            lacks = "Xavier weights at dt = 1, or ReLU without biases under pre"
    share = 0.0
    if last.bound:
        share = last.measured / last.bound
    reasons = [f"the last FFN's gradient is {last.measured:.3g}, {share:.2g} times its bound"]
    growth = f"the depth adds {three(gradient.added)} to mean |x|^2/d"
    if isinstance(config, GPTConfig) and low is not None:
        growth += (
            f", and freshly drawn '{config.initialisation}' weights add {low:.3g} to {high:.3g} in"
            " the mean"
        )
    reasons.append(growth)
    if slope is not None:
        reasons.append(f"the gradient's exponent in depth is {slope:g} by theory")
    if lacks:
        reasons.append(f"Xiong's lemma 2 and theorem 1 lack a premise: {lacks}")
    if share <= 1 + EXACT:
        verdict = "holds"
    else:
        verdict = "violated"
    result = InitialisationStep(low, high, gradient.added, slope, last, lacks)
    return StepVerdict(
        verdict, f"|dL/dW_2| = {last.measured:.2g}", "; ".join(reasons), result=result
    )


def _mean_square(x: Tensor) -> float:
    return float(x.detach().double().square().mean())


def _of_the_papers(config: GPTConfig) -> bool:
    """Whether Xiong's theory covers the maps."""
    return (
        config.attention == "softmax"
        and config.ffn == "mlp"
        and config.residual == "plain"
        and not config.parallel_blocks
        and not config.is_stack
        and config.parametrisation == STANDARD
        and part_of(AttentionOptions, config).idle
    )


def _growth(config: GPTConfig) -> tuple[float, float] | tuple[None, None]:
    """Lemma 2's range of what `pre` adds to E|x|^2/d over the depth, if it applies."""
    if (
        not _of_the_papers(config)
        or config.placement != "pre"
        or config.activation != "relu"
        or config.bias
    ):
        return None, None
    attention_gain, ffn_gain = gains(
        config.initialisation, config.depth, config.width, config.hidden_width
    )
    attention = config.dt**2 * attention_gain
    ffn = config.dt**2 * ffn_gain
    return config.depth * ffn, config.depth * (attention + ffn)
