"""Attention sensitivity (Emadi): theta by head and row, the norm of the softmax Jacobian, and Lipschitz bounds in the block norm.

All bounds are local, at the given state: the norm of the Jacobian there is below them (theorems 5.1-5.3). The printed forms have no
biases and take activations of slope 1; the corrected ones below hold with the biases and activations that models have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.fields import HasLipschitz, ShowsHeads, ShowsMatrices, plain_attention, spectral_norm, why_not
from ctrans.norm import Norm
from ctrans.stability.attention.balanced_mass import BalancedMass, balanced_mass
from ctrans.stability.attention.block_norm import block_gain
from ctrans.sublayer import Sublayer
from solvers import ConfigError
from solvers.segment import Map

ROWS = 8
"""At how many tokens the local value of a map is measured."""


@dataclasses.dataclass(frozen=True)
class Pathways:
    """L_MHA <= value + attention at a state: theorem 5.1's two terms, |W_O| sum_h |V_h| and |W_O| sum_h theta_h/tau Phi_h."""

    value: float
    attention: float

    @property
    def bound(self) -> float:
        return self.value + self.attention


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """One attention sublayer at its state. Lists run over heads; theta over every row that reads something.

    `theta_width` is the widest bracket, `masked` the number of rows that read nothing. `softmax_norm` is max theta/tau. `bound` is
    theorem 5.1, `printed` its form without biases, `measured` the local value found at `ROWS` tokens, `ratio` bound over measured.
    G = |W_O||W_Q||W_K||W_V|, B = sqrt(d) |U|_{inf,rms} of the map's input U, S = (theta/tau) B^2 G, and `log_sensitivity` the
    three logarithms that add up to log S (Emadi, E.6). `stream` is B of the hidden state, which the paper's S grows with. Where
    the state is not finite, `finite` is false and figures are nan.
    """

    index: int
    finite: bool
    theta_mean: list[float]
    theta_max: list[float]
    theta_min: list[float]
    theta_width: float
    masked: int
    softmax_norm: float
    value_path: float
    attention_path: float
    bound: float
    printed: float
    measured: float
    ratio: float
    G: float
    B: float
    stream: float
    S: float
    log_sensitivity: dict[str, float]


@dataclasses.dataclass(frozen=True)
class BlockLayer:
    """One block's step at its state: theorems 5.2, 5.3 with the norms' slopes there (`bound`), as printed with Lip(N) =
    max|gamma|/sqrt(eps) everywhere (`printed`), the local value found, and bound over it.
    """

    index: int
    bound: float
    printed: float
    measured: float
    ratio: float


@torch.no_grad()
def attention_theta(
    attention: ShowsHeads,
    u: Float[Tensor, "*batch tokens width"],
    padding: Bool[Tensor, "*batch tokens"] | None = None,
    *,
    tolerance: float = 1e-9,
) -> BalancedMass:
    """theta of every row (*batch, heads, tokens) of the map's attention at its input U, in float64.

    `padding` is true where a token is padding: no row reads it, and its own row is masked, as is a row left with nothing to read.
    """
    p = attention.probabilities(u)
    if padding is None:
        return balanced_mass(p, tolerance=tolerance)
    read = ~padding[..., None, None, :] & ~padding[..., None, :, None]
    kept = torch.where(read, p, 0.0)
    sums = kept.sum(-1, keepdim=True)
    return balanced_mass(kept / torch.where(sums > 0, sums, 1.0), tolerance=tolerance)


def softmax_jacobian(p: Float[Tensor, "*rows entries"], temperature: float) -> Float[Tensor, "*rows entries entries"]:
    """J = (diag(p) - p p')/tau, the derivative of softmax(u/tau); |J|_{inf->1} = theta(p)/tau (Emadi, theorem 4.2)."""
    return (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)) / temperature


def attention_bound(attention: ShowsHeads, b: float, theta: Sequence[float], *, biases: bool = True) -> Pathways:
    """|W_O| sum_h (|V_h| + theta_h/tau B ((2 B |Q_h| + |b_Q,h|) |K_h| + |Q_h| |b_K,h|) |V_h| / sqrt(d_h)), theta_h the largest of
    head h's rows.

    B = max_i |u_i|_2 of the inputs. Theorem 5.1 has no offsets, and with them is false (`biases=False` gives that form). Those of
    values do not enter: they meet changes of attention that sum to zero. Those of keys shift a row's scores alike and do not enter
    either, but where positions turn the keys, or scores are capped (`HeadMatrices`). Rotations do not change the norms of Q and K, and
    a cap of slope at most 1 makes no change of scores larger, so the theorem holds with both. Raises ConfigError for normalised
    queries and keys, for which it says nothing.
    """
    if attention.normalised_scores:
        raise ConfigError(
            f"theorem 5.1 does not cover qk_norm: its bound is for queries and keys linear in the input{why_not(attention)}"
        )
    value_path = attention_path = 0.0
    outs = []
    for largest, head in zip(theta, attention.head_matrices(), strict=True):
        norm_q, norm_k, norm_v = (spectral_norm(matrix) for matrix in (head.query, head.key, head.value))
        q_0, k_0 = (_length(offset) if biases else 0.0 for offset in (head.query_offset, head.key_offset))
        value_path += norm_v
        scores = b * ((2 * b * norm_q + q_0) * norm_k + norm_q * k_0) / math.sqrt(len(head.query))
        attention_path += largest / attention.temperature * scores * norm_v
        outs.append(head.out)
    out = spectral_norm(torch.cat(outs, 1))
    return Pathways(out * value_path, out * attention_path)


def norm_slope(norm: Norm | None, x: Float[Tensor, "*batch tokens width"]) -> float:
    """max_i |J_N(x_i)|_2 <= max|gamma| / min_i sigma(x_i), in the block norm; 1 where there is no norm."""
    return 1.0 if norm is None else float(norm.gamma.detach().abs().max() / norm.sigma(x).min())


def norm_slope_anywhere(norm: Norm | None) -> float:
    """Lip(N) <= max|gamma| / sqrt(eps) (Emadi, lemma A.1); inf for eps = 0."""
    if norm is None:
        return 1.0
    return float(norm.gamma.detach().abs().max()) / math.sqrt(norm.eps) if norm.eps else math.inf


@torch.no_grad()
def attention_layers(
    depth: Depth,
    states: Sequence[Float[Tensor, "batch tokens width"]],
    *,
    padding: Bool[Tensor, "batch tokens"] | None = None,
    seed: int = 0,
) -> list[AttentionLayer]:
    """Theta, theorem 5.1, G and S of every attention sublayer, each at the state that enters it: states[k] for sublayer k.

    Local values are measured on the first sequence. `padding` concerns theta alone: our attention itself knows no padding. Raises
    ConfigError for attention that is not ours and for normalised queries and keys.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        _layer(index, sublayer, x.detach(), padding, generator)
        for index, (sublayer, x) in enumerate(zip(depth.sublayers, states, strict=False))
        if sublayer.kind == "attention"
    ]


@torch.no_grad()
def block_layers(
    depth: Depth, states: Sequence[Float[Tensor, "batch tokens width"]], *, iterations: int = 8, seed: int = 0
) -> list[BlockLayer]:
    """Every block's Lipschitz bound at the state that enters it, for any placement: the product over its sublayers of
    slope(N_state) (1 + h gain slope(N_out) L_f slope(N_in)). `pre` is theorem 5.2, `post` theorem 5.3, with step h.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [float(span) * depth.dt for span in depth.spans]
    layers = []
    for block in range(depth.blocks):
        inside = range(block * depth.per_block, (block + 1) * depth.per_block)
        if inside[-1] >= len(states):
            break
        steps = [(depth.sublayers[k], lengths[k], states[k].detach()) for k in inside]
        bound = math.prod(step_bound(*step) for step in steps)
        printed = math.prod(step_bound(*step, printed=True) for step in steps)
        measured = _measure(_chain([(sublayer, h) for sublayer, h, _ in steps]), depth, steps[0][2], generator, iterations)
        layers.append(BlockLayer(block, bound, printed, measured, _ratio(bound, measured)))
    return layers


def step_bound(sublayer: Sublayer, h: float, x: Float[Tensor, "*batch tokens width"], *, printed: bool = False) -> float:
    """slope(N_state) (1 + h gain slope(N_out) L_f slope(N_in)) >= |J| of the step X + h r(X), each slope where it acts.

    `printed` takes Lip(N) = max|gamma|/sqrt(eps), no biases of queries, and slope 1 of the activation, as the paper does.
    """
    u = x if sublayer.input_norm is None else sublayer.input_norm(x)
    steepness = [sublayer.gain, map_bound_at(sublayer, u, printed=printed)]
    after = x + h * sublayer(x)
    for norm, at in ((sublayer.input_norm, x), (sublayer.output_norm, sublayer.field(u))):
        steepness.append(norm_slope_anywhere(norm) if printed else norm_slope(norm, at))
    outer = norm_slope_anywhere(sublayer.state_norm) if printed else norm_slope(sublayer.state_norm, after)
    return outer * (1 + h * math.prod(steepness))


def map_bound_at(sublayer: Sublayer, u: Float[Tensor, "*batch tokens width"], *, printed: bool = False) -> float:
    """L_f of the sublayer's map at its input U: theorem 5.1, or the FFN's weights."""
    field, largest = sublayer.field, float(torch.linalg.vector_norm(u, dim=-1).max())
    if isinstance(field, ShowsHeads):
        theta = attention_theta(field, u, tolerance=1e-3).upper.movedim(-2, 0).flatten(1).amax(1)
        return attention_bound(field, largest, theta.tolist(), biases=not printed).bound
    if isinstance(field, HasLipschitz):
        return field.lipschitz(largest, printed=printed)
    raise ConfigError(
        f"no Lipschitz bound is known for a field of type {type(field).__name__}: it does not say `lipschitz()`{why_not(field)}"
    )


def sensitivity_growth(layers: Sequence[AttentionLayer]) -> dict[str, float]:
    """By how much each part of log S changes from the first attention layer to the last, finite ones (Emadi, E.6)."""
    finite = [layer.log_sensitivity for layer in layers if layer.finite]
    return {name: finite[-1][name] - finite[0][name] for name in finite[0]} if finite else {}


def _layer(index: int, sublayer: Sublayer, x: Tensor, padding: Tensor | None, generator: torch.Generator) -> AttentionLayer:
    field = sublayer.field
    if not (isinstance(field, ShowsHeads) and isinstance(field, ShowsMatrices)):
        raise ConfigError(f"attention of type {type(field).__name__} does not show its rows and the matrices of its heads")
    u = x if sublayer.input_norm is None else sublayer.input_norm(x)
    if not bool(torch.isfinite(u).all()):
        return _broken(index, field.heads)
    mass = attention_theta(field, u, padding)
    # heads first, rows after; masked rows count in no figure
    lower, upper, masked = (part.movedim(-2, 0).flatten(1) for part in (mass.lower, mass.upper, mass.masked))
    highest = upper.amax(1)
    lowest = torch.where(masked, math.inf, lower).amin(1)
    mean = lower.sum(1) / (~masked).sum(1)
    b, stream = (float(torch.linalg.vector_norm(state, dim=-1).max()) for state in (u, x))
    # padding changes which rows count, not what the map itself does
    whole = highest if padding is None else attention_theta(field, u).upper.movedim(-2, 0).flatten(1).amax(1)
    paths = attention_bound(field, b, whole.tolist())
    measured = _measure(sublayer.field, sublayer, u, generator)
    product = math.prod(spectral_norm(matrix.weight) for matrix in field.matrices())
    logs = {"theta": _log(float(highest.max()) / field.temperature), "B": 2 * _log(b), "G": _log(product)}
    return AttentionLayer(
        index=index,
        finite=True,
        theta_mean=mean.tolist(),
        theta_max=highest.tolist(),
        theta_min=lowest.tolist(),
        theta_width=float(mass.width.max()),
        masked=int(masked.sum()),
        softmax_norm=float(highest.max()) / field.temperature,
        value_path=paths.value,
        attention_path=paths.attention,
        bound=paths.bound,
        printed=attention_bound(field, b, whole.tolist(), biases=False).bound,
        measured=measured,
        ratio=_ratio(paths.bound, measured),
        G=product,
        B=b,
        stream=stream,
        S=math.exp(sum(logs.values())),
        log_sensitivity=logs,
    )


def _broken(index: int, heads: int) -> AttentionLayer:
    """What is known of a layer whose state is not finite: nothing."""
    unknown = [math.nan] * heads
    figures = {field.name: math.nan for field in dataclasses.fields(AttentionLayer) if field.type == "float"}
    lists = {"theta_mean": unknown, "theta_max": unknown, "theta_min": unknown}
    return AttentionLayer(index=index, finite=False, masked=0, log_sensitivity={}, **lists, **figures)  # type: ignore[arg-type]  # by name


def _measure(function: Map, holder: torch.nn.Module, x: Tensor, generator: torch.Generator, iterations: int = 8) -> float:
    first = x.flatten(0, -3)[0] if x.dim() > 2 else x
    rows = torch.linspace(0, first.shape[0] - 1, min(ROWS, first.shape[0]), device=x.device).round().long()
    with plain_attention(holder):
        return block_gain(function, first, rows=rows, iterations=iterations, generator=generator)


def _chain(steps: Sequence[tuple[Sublayer, float]]) -> Map:
    def function(x: Tensor) -> Tensor:
        for sublayer, h in steps:
            x = sublayer.step(x, h)
        return x

    return function


def _ratio(bound: float, measured: float) -> float:
    return bound / measured if measured else math.inf


def _length(offset: Tensor | None) -> float:
    return 0.0 if offset is None else float(torch.linalg.vector_norm(offset.detach().double()))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
