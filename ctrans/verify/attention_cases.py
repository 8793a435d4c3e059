"""Random cases of each bound on attention and on the last layer: (measured, bound), with measured <= bound wherever theory is right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.fields import reference_kernels, spectral_norm
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.placement import PLACEMENTS
from ctrans.stability.attention.balanced_mass import balanced_mass, smallest_difference
from ctrans.stability.attention.block_norm import block_norm, chosen, gain_of_rows, one_for_each
from ctrans.stability.attention.bounds import attention_bound, attention_theta, norm_slope
from ctrans.stability.attention.by_depth import ROWS, block_layers
from ctrans.stability.backward.singular_values import linearise
from ctrans.stability.initialisation.theory import last_layer_bound
from ctrans.verify.draws import PAPERS
from ctrans.walk import states_of
from solvers.segment import Map

BoundCase = Callable[[torch.Generator], tuple[float, float]]


def all_subsets(entries: int) -> Float[Tensor, "subsets entries"]:
    """Every subset as a row of zeros and ones."""
    return ((torch.arange(2**entries).unsqueeze(-1) >> torch.arange(entries)) & 1).double()


def block_gain(
    function: Map,
    x: Float[Tensor, "tokens width"],
    *,
    rows: Int[Tensor, " rows"] | None = None,
    iterations: int = 8,
    generator: torch.Generator | None = None,
) -> float:
    """`gain_of_rows` of a function that maps (batch, tokens, width) to the same shape, sequence by sequence, at the state x.

    `rows` says which output tokens are looked at, all by default. The function must have second derivatives.
    """
    rows = torch.arange(x.shape[0], device=x.device) if rows is None else rows
    linear = linearise(lambda x: chosen(function(x), rows), one_for_each(rows, x))
    return gain_of_rows(linear, iterations=iterations, generator=generator)


def softmax_jacobian(p: Float[Tensor, "*rows entries"], temperature: float) -> Float[Tensor, "*rows entries entries"]:
    """J = (diag(p) - p p')/tau, the derivative of softmax(u/tau); |J|_{inf->1} = theta(p)/tau (Emadi, theorem 4.2)."""
    return (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)) / temperature


def peaked_bound(p: Float[Tensor, "*rows entries"]) -> Float[Tensor, "*rows"]:
    """4 kappa (1 - kappa) where the largest entry 1 - kappa is at least 1/2, otherwise 1: never below theta.

    Corollary 4.3(3) of Emadi states the first form for every kappa, which is false for kappa > 1/2.
    """
    top = p.amax(-1)
    return torch.where(top >= 0.5, 4 * top * (1 - top), torch.ones_like(top))


def softmax_norm(generator: torch.Generator) -> tuple[float, float]:
    """|J|_{inf->1} over every sign vector, against theta(p)/tau (theorem 4.2; they are equal)."""
    p, tau = _row(generator, 10), _between(generator, 0.2, 3.0)
    signs = 2 * all_subsets(len(p)) - 1
    measured = (signs @ softmax_jacobian(p, tau)).abs().sum(-1).amax()
    return float(measured), float(balanced_mass(p).upper) / tau


def theta_bracket(generator: torch.Generator) -> tuple[float, float]:
    """By how much theta, found by meeting in the middle of the whole row, lies outside its bracket, as a ratio against 1."""
    p = _row(generator, 36, 31)
    mass, theta = balanced_mass(p, tolerance=1e-6), 1 - float(smallest_difference(p.unsqueeze(0))) ** 2
    if theta == 0:
        return 1 + float(mass.upper), 1.0
    return max(float(mass.lower) / theta, theta / float(mass.upper)), 1.0


def peaked(generator: torch.Generator) -> tuple[float, float]:
    """theta over every subset against 4 kappa (1 - kappa), kappa <= 1/2 (corollary 4.3(3), corrected)."""
    p = _row(generator, 12)
    p[p.argmax()] += 1  # at least half of the mass
    p = p / p.sum()
    sums = all_subsets(len(p)) @ p
    return float((4 * sums * (1 - sums)).amax()), float(peaked_bound(p))


def mixing(generator: torch.Generator) -> tuple[float, float]:
    """|A V|_{inf,rms} against |V|_{inf,rms} for attention rows A (lemma 3.2)."""
    p = torch.stack([_row(generator, 6, 6) for _ in range(4)])
    v = _noise(generator, 6, 5)
    return float(block_norm(p @ v)), float(block_norm(v))


def reset(generator: torch.Generator) -> tuple[float, float]:
    """|N(x)|_{inf,rms} against max|gamma| + max|beta| (lemma 3.3)."""
    model, x = _model(generator, "pre")
    norm = model.depth.sublayers[0].input_norm
    assert norm is not None
    return float(block_norm(norm(x))), float(norm.gamma.abs().max() + norm.beta.abs().max())


def norm_jacobian(generator: torch.Generator) -> tuple[float, float]:
    """max_i |J_N(x_i)|_2 against max|gamma|/min sigma (lemma A.1, locally)."""
    model, x = _model(generator, "pre")
    norm = model.depth.sublayers[0].input_norm
    assert norm is not None
    return max(spectral_norm(jacobian) for jacobian in norm.jacobian(x[0])), norm_slope(norm, x)


def attention_map(generator: torch.Generator) -> tuple[float, float]:
    """The local value of attention against theorem 5.1 with its biases."""
    model, x = _model(generator, "none")
    attention = model.depth.sublayers[0].field
    theta = attention_theta(attention, x).upper.movedim(-2, 0).flatten(1).amax(1).tolist()
    with reference_kernels(attention):
        measured = block_gain(attention, x[0], iterations=2, generator=generator)
    return measured, attention_bound(attention, float(torch.linalg.vector_norm(x, dim=-1).max()), theta).bound


def block(generator: torch.Generator) -> tuple[float, float]:
    """The local value of a block of any placement against the product of its sublayers' bounds (theorems 5.2, 5.3)."""
    model, x = _model(generator, _one_of(generator, sorted(PLACEMENTS)))
    (layer,) = block_layers(model.depth, states_of(model.depth, x), iterations=2, seed=_below(generator, 2**31))
    return layer.measured, layer.bound


def last_layer(generator: torch.Generator) -> tuple[float, float]:
    """|dL/dW_2| of a last FFN of any placement against Kim's proposition 3.1, corrected."""
    model, x = _model(generator, _one_of(generator, sorted(PLACEMENTS)))
    found = last_layer_bound(model.depth.sublayers[-1], model.depth.dt, x, _noise(generator, *x.shape))
    return found.measured, found.bound


BOUND_CASES: dict[str, BoundCase] = {
    "softmax norm": softmax_norm,
    "theta bracket": theta_bracket,
    "peaked rows": peaked,
    "mixing": mixing,
    "norm reset": reset,
    "norm Jacobian": norm_jacobian,
    "attention": attention_map,
    "block": block,
    "last layer": last_layer,
}
"""Each draws a case from its generator and returns (measured, bound). Rounding is `exceeds`'s to allow for."""


def exceeds(measured: float, bound: float) -> bool:
    """Whether measured > bound beyond the rounding of float64, which in 1 - delta^2 is absolute; nan exceeds."""
    return not measured <= bound * (1 + 1e-9) + 1e-14


def _model(generator: torch.Generator, placement: str) -> tuple[GPT, Float[Tensor, "1 tokens width"]]:
    """One block with learned-looking gains, offsets and biases, and a state for it, both of any size."""
    heads = 1 + _below(generator, 2)
    width = heads * (1 + _below(generator, 4)) + (heads == 1)
    norm = _one_of(generator, list(PAPERS))
    config = GPTConfig(
        vocab_size=2,
        context=ROWS,
        depth=1,
        width=width,
        heads=heads,
        placement=placement,
        norm=norm,
        dt=_between(generator, 0.05, 2.0),
        activation=_one_of(generator, ["gelu", "relu", "silu", "tanh"]),
        causal=bool(_below(generator, 2)),
        temperature=_between(generator, 0.3, 3.0),
        initialisation="lecun",
    )
    model = GPT(config, seed=_below(generator, 2**31)).double().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(_between(generator, 0.0, 1.0) * _noise(generator, *parameter.shape))
    size = 10 ** _between(generator, -2.0, 1.0)
    return model, size * _noise(generator, 1, 1 + _below(generator, ROWS), width)


def _row(generator: torch.Generator, longest: int, shortest: int = 1) -> Float[Tensor, " entries"]:
    """A softmax row: logits of any spread, some of them equal."""
    entries = shortest + _below(generator, longest - shortest + 1)
    logits = 10 ** _between(generator, -3.0, 1.0) * _noise(generator, entries)
    return (logits.round(decimals=1) if _below(generator, 2) else logits).softmax(-1)


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _below(generator: torch.Generator, end: int) -> int:
    return int(torch.randint(end, (), generator=generator))


def _between(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), dtype=torch.float64, generator=generator))


def _one_of(generator: torch.Generator, names: list[str]) -> str:
    return names[_below(generator, len(names))]
