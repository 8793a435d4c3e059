"""What the screening says beside Kan's steps: attention sensitivity (Emadi), and the theory of initialisation (Xiong, Kim)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ctrans.control.costate import costate
from ctrans.depth import Depth
from ctrans.fields import ShowsHeads
from ctrans.model.config import GPTConfig
from ctrans.stability.attention.bounds import AttentionLayer, BlockLayer, attention_layers, block_layers, sensitivity_growth
from ctrans.stability.initialisation.theory import SLOPES, LastLayer, Setting, gains, last_layer_bound
from ctrans.stability.screening.case import Case, Finding, attempt, spread
from ctrans.stability.screening.score import decades
from solvers import ConfigError

STEADY = math.log10(2)
"""Growth of S over the depth, in decades, that counts as none."""


@dataclasses.dataclass(frozen=True)
class AttentionStep:
    """Attention layers and blocks by depth, and what the growth of log S from the first to the last layer is made of."""

    layers: list[AttentionLayer]
    blocks: list[BlockLayer]
    growth: dict[str, float]


def screen_attention(case: Case) -> Finding:
    """Theta, theorem 5.1 and S = (theta/tau) B^2 G by layer, and the block bounds 5.2 and 5.3 (theory, section 9).

    The ingredient is by how many decades S grows from the middle of the depth to the last attention layer: the first layers show
    the size of the embeddings, and no growth.
    """
    depth, states = case.model.depth, [case.part(x) for x in case.reached]
    notes: list[str] = []
    own = [k for k, sublayer in enumerate(depth.sublayers) if sublayer.kind == "attention" and k < len(states)]
    if not own:
        raise ConfigError("no attention sublayer was reached, so there is no attention to speak of")
    chosen = [own[i] for i in spread(len(own), case.effort.layers)]
    if not all(isinstance(depth.sublayers[k].field, ShowsHeads) for k in chosen):
        raise ConfigError(
            "theta and theorem 5.1 need each head's rows and matrices, which another library's attention does not show"
        )
    found = attention_layers(_some(depth, chosen), [states[k] for k in chosen], seed=case.seed)
    layers = [dataclasses.replace(layer, index=k) for layer, k in zip(found, chosen, strict=True)]
    growth = sensitivity_growth(layers)
    blocks = attempt(notes, _blocks, case, states) if case.effort.blocks and len(states) > depth.per_block else None
    result = AttentionStep(layers, blocks or [], growth)
    k = _decades(layers[len(layers) // 2 :])
    verdict = "unknown" if math.isnan(k) else "steady" if k < STEADY else "grows"
    first, last = layers[0], layers[-1]
    middle = layers[len(layers) // 2]
    theta = max(max(layer.theta_max) for layer in layers)
    why = (
        f"S = (theta/tau) B^2 G goes from {first.S:.3g} over {middle.S:.3g} in the middle to {last.S:.3g}, theta is at most "
        f"{theta:.3g}, and theorem 5.1 allows up to {max(layer.ratio for layer in layers):.3g} times what is measured"
    )
    return Finding(verdict, f"S = {last.S:.3g}", why, {"S in depth": k}, notes, result)


def _decades(layers: Sequence[AttentionLayer]) -> float:
    """From the first of the layers to the last; none where attention ends up insensitive, as one-hot rows are."""
    start, end = layers[0].S, layers[-1].S
    if end == 0:
        return 0.0
    return decades(end / start) if start and math.isfinite(end) else math.nan


def _some(depth: Depth, chosen: Sequence[int]) -> Depth:
    return Depth([depth.sublayers[k] for k in chosen], depth.dt, spans=[depth.spans[k] for k in chosen], per_block=1)


def _blocks(case: Case, states: Sequence[Tensor]) -> list[BlockLayer]:
    depth = case.model.depth
    whole = min(depth.blocks, (len(states) - 1) // depth.per_block)
    chosen = spread(whole, case.effort.blocks)
    inside = [k for block in chosen for k in range(block * depth.per_block, (block + 1) * depth.per_block)]
    part = Depth(
        [depth.sublayers[k] for k in inside], depth.dt, spans=[depth.spans[k] for k in inside], per_block=depth.per_block
    )
    found = block_layers(part, [states[k] for k in inside], seed=case.seed)
    return [dataclasses.replace(layer, index=block) for layer, block in zip(found, chosen, strict=True)]


@dataclasses.dataclass(frozen=True)
class InitialisationStep:
    """Kim's bound on the last layer's gradient at the weights as they are, and what Xiong says of freshly drawn ones.

    `low` and `high` bound what `pre` adds to E|x|^2/d over the depth, for ReLU without biases. `slope` is d log|dL/dW_2|/d log
    depth, in Xiong's setting: Xavier weights, dt = 1. Each is None for other architectures, of which the theory says nothing.
    """

    low: float | None
    high: float | None
    slope: float | None
    last: LastLayer


EXACT = 1e-4
"""By how much a measured gradient may exceed a bound that it attains, as with one token: rounding in float32."""


def screen_initialisation(case: Case) -> Finding:
    """Kim's proposition 3.1 measured; Xiong's lemma 2 and theorem 1 where they apply (theory, section 10). Not scored."""
    if case.trained:
        raise ConfigError("these weights come from a file, and the theory of initialisation speaks of freshly drawn ones alone")
    config, depth = case.model.config, case.model.depth
    if not isinstance(config, GPTConfig):
        raise ConfigError(
            "the theory of initialisation speaks of weights that ctrans drew for maps of its own, not of another library's"
        )
    found = costate(case.model, case.part(case.tokens), case.part(case.targets))
    h = float(depth.segments()[-1].length)
    with torch.no_grad():
        last = last_layer_bound(depth.sublayers[-1], h, found.states[-2], found.costates[-1])
    low, high = _growth(config)
    slope = SLOPES.get(config.placement) if config.initialisation in XAVIER and config.dt == 1 else None
    share = last.measured / last.bound if last.bound else 0.0
    said = [f"the last FFN's gradient is {last.measured:.3g}, {share:.0%} of its bound"]
    if low is not None:
        said.append(f"'{config.initialisation}' weights add {low:.3g} to {high:.3g} to E|x|^2/d over the depth")
    if slope is not None:
        said.append(f"the gradient's exponent in depth is {slope:g} by theory")
    if low is None and slope is None:
        said.append("Xiong's theory speaks of other architectures (Xavier weights at dt = 1; ReLU without biases)")
    verdict = "holds" if share <= 1 + EXACT else "violated"
    return Finding(
        verdict, f"|dL/dW_2| = {last.measured:.2g}", "; ".join(said), result=InitialisationStep(low, high, slope, last)
    )


XAVIER = ("xavier", "xiong")


def _growth(config: GPTConfig) -> tuple[float, float] | tuple[None, None]:
    """What lemma 2 lets `pre` add to E|x|^2/d over the depth, where it applies."""
    if config.placement != "pre" or config.activation != "relu" or config.bias:
        return None, None
    width, hidden = config.width, config.ffn_width or 4 * config.width
    setting = Setting(width=width, initialisation=config.initialisation, heads=config.heads, ffn_width=hidden)
    attention, ffn = (config.dt**2 * gain for gain in gains(setting, config.depth))
    return config.depth * ffn, config.depth * (attention + ffn)
