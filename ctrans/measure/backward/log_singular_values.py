"""Mean and spread of log singular values of a Jacobian, from products with it, by stochastic
Lanczos quadrature.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ctrans.dynamics.depth import Depth, check_count
from ctrans.measure.backward.sensitivity import ALL_AT_ONCE, StepGraphs
from ctrans.measure.backward.singular_values import Linearisation, compose
from solvers import ConfigError, SolveError

FLOOR = 1e-4
"""Singular values below this share of the largest count as zero. They belong to directions that a
norm removes, so their logarithm has no meaning.
"""

ONE_SUFFICES = 2**14
"""From this number of dimensions one probe is enough: its standard error is below a ninetieth of
the deviation.
"""


@dataclasses.dataclass(frozen=True)
class LogSingularValues:
    """Mean and standard deviation of log sigma over the nonzero singular values of a Jacobian, with
    estimated errors.

    `lost` is the share of singular values below `FLOOR` times the largest, which count as zero, as
    far as the Lanczos steps resolve them.
    """

    mean: float
    mean_error: float
    deviation: float
    deviation_error: float
    lost: float


def depth_spectrum(
    depth: Depth, graphs: StepGraphs, *, probes: int | None = None, steps: int = 48
) -> LogSingularValues:
    """`log_singular_values` of J_{0:D} = dX_D/dX_0. `graphs` must have been in a finished walk.

    Raises ConfigError if weights are made on demand, SolveError if states are not finite.
    """
    if depth.streamed:
        raise ConfigError(f"the spectrum of J_0:D is {ALL_AT_ONCE}")
    return log_singular_values(
        compose(graphs.finite_steps("J_0:D has no spectrum")), probes=probes, steps=steps
    )


@torch.no_grad()
def log_singular_values(
    linear: Linearisation,
    *,
    probes: int | None = None,
    steps: int = 24,
    generator: torch.Generator | None = None,
) -> LogSingularValues:
    """1/n sum_i g(sigma_i) for g = log and log^2, by stochastic Lanczos quadrature (Ubaru, Chen and
    Saad 2017).

    For a random unit z, E z' g(J'J) z = tr g(J'J)/n, and m Lanczos steps of J'J from z give the
    Gauss quadrature of z' g(J'J) z: nodes theta_i, the eigenvalues of the tridiagonal T, and
    weights, the squares of the first entries of its eigenvectors. A batch of sequences is one
    block-diagonal J. The cost is `probes` times `steps` pairs of products with J and J'. The
    default is two probes, and one from `ONE_SUFFICES` dimensions on.

    The error estimate is the larger of two figures. One is the standard error of the probes
    (`_standard_errors`). The other is the change by the second half of the steps, times
    log2(1/(FLOOR m))/3: m steps resolve singular values down to about 1/m of the largest, so on a
    wide spectrum each doubling of m changes the mean by about the same amount until FLOOR is
    resolved. In measured cases a third of these doublings was missing. Raises ConfigError for
    counts below 1, SolveError if J is not finite or zero.
    """
    if probes is None and linear.x.numel() >= ONE_SUFFICES:
        probes = 1
    elif probes is None:
        probes = 2
    probes = check_count("probes", probes)
    check_count("steps", steps)
    generator = generator or torch.Generator().manual_seed(0)
    drawn = torch.randn(probes, *linear.x.shape, generator=generator, dtype=linear.x.dtype).to(
        linear.x.device
    )
    rules = [_lanczos(linear, z, min(steps, z.numel())) for z in drawn]
    quadratures = [_rule(*rule) for rule in rules]
    top = max(float(nodes.max()) for nodes, _ in quadratures)
    if not 0 < top < math.inf:
        raise SolveError(
            "the Jacobian of the depth is zero or not finite, so that its singular values have no"
            " logarithm"
        )
    nonzero = [_nonzero(nodes, weights, top) for nodes, weights in quadratures]
    moments = torch.stack([_moments(weights, logs) for weights, logs in nonzero])
    mean, deviation = _statistics(moments.mean(0))
    errors = torch.stack([_standard_errors(weights, logs) for weights, logs in nonzero]).mean(0)
    errors = errors / math.sqrt(probes * (linear.x.numel() + 2) / 2)
    ran_all_steps = all(len(alpha) == steps for alpha, _ in rules)
    if ran_all_steps and steps < linear.x.numel():  # else the quadrature is exact
        moments_of_half = []
        for alpha, beta in rules:
            nodes, weights = _rule(alpha[: (steps + 1) // 2], beta)
            moments_of_half.append(_moments(*_nonzero(nodes, weights, top)))
        half = torch.stack(moments_of_half).mean(0)
        changed = torch.tensor([mean, deviation]) - torch.tensor(_statistics(half))
        errors = torch.maximum(errors, changed.abs() * max(1.0, math.log2(1 / (FLOOR * steps)) / 3))
    return LogSingularValues(
        mean,
        float(errors[0]),
        deviation,
        float(errors[1]),
        max(0.0, 1 - float(moments[:, 0].mean())),
    )


def _statistics(moments: Tensor) -> tuple[float, float]:
    """Mean and standard deviation from the masses of 1, log sigma and its square."""
    mass, first, second = moments.tolist()
    return first / mass, math.sqrt(max(second / mass - (first / mass) ** 2, 0.0))


def _lanczos(linear: Linearisation, z: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Diagonal and off-diagonal of T, from an orthogonal basis. They end where the Krylov space is
    exhausted.
    """
    v = (z / torch.linalg.vector_norm(z)).flatten()
    basis = [v]
    alpha = list[float]()
    beta = list[float]()
    for _ in range(steps):
        w = linear.pull(linear.push(basis[-1].reshape(z.shape))).flatten()
        alpha.append(float(basis[-1] @ w))
        rows = torch.stack(basis)
        for _ in range(2):  # twice is enough (Parlett)
            w = w - rows.mT @ (rows @ w)
        size = float(torch.linalg.vector_norm(w))
        if not size > torch.finfo(z.dtype).eps * max(map(abs, alpha)):
            break
        beta.append(size)
        basis.append(w / size)
    return torch.tensor(alpha, dtype=torch.float64), torch.tensor(beta, dtype=torch.float64)


def _rule(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss quadrature."""
    if not alpha.isfinite().all():
        return torch.tensor([math.nan]), torch.tensor([1.0])
    off = beta[: len(alpha) - 1]
    nodes, vectors = torch.linalg.eigh(torch.diag(alpha) + torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, vectors[0].square()


def _moments(weights: Tensor, logs: Tensor) -> Tensor:
    """The quadrature of 1, log sigma and (log sigma)^2."""
    return torch.stack([weights.sum(), (weights * logs).sum(), (weights * logs.square()).sum()])


def _nonzero(nodes: Tensor, weights: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Weights of the nodes, 0 for those that count as zero, and log sigma."""
    counted = nodes > FLOOR**2 * top
    return torch.where(counted, weights, 0.0), 0.5 * torch.where(counted, nodes, 1.0).log()


def _standard_errors(weights: Tensor, logs: Tensor) -> Tensor:
    """The standard errors of the mean m and the deviation s of one probe, times sqrt((n + 2)/2).
    nan if all nodes count as zero.

    For z uniform on the unit sphere of R^n the variance of z'Az is 2/(n + 2) (tr A^2/n - (tr
    A/n)^2). To first order the error of m is z' (log sigma - m) z/w and that of s is z' ((log sigma
    - m)^2 - s^2) z/(2 s w), with w the mass of the nodes that do not count as zero. Both matrices
      have trace 0.
    """
    mass = float(weights.sum())
    centred = logs - (weights * logs).sum() / mass
    variance = (weights * centred.square()).sum() / mass
    fourth = (weights * (centred.square() - variance).square()).sum() / mass
    resolved = torch.finfo(logs.dtype).eps  # an isometry has s = 0 without error
    return torch.stack([variance, fourth / (4 * variance.clamp(min=resolved))]).div(mass).sqrt()
