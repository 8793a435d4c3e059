"""Weights as functions of depth: theta(s) = sum_j c_j phi_j(s), s = t/T in [0, 1], with few
coefficients c_j for any number of blocks.

A block uses theta at the middle of its interval. Then the limit D to infinity at fixed T exists and
is the averaged ODE (theory, section 2), and the same coefficients serve any depth. With "network"
the functions are trained too: phi(s) includes a small network of a time embedding. It applies to
gains of norms as to matrices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from fractions import Fraction
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ctrans.dynamics.weights.time_network import TimeNetwork
from solvers import look_up

Block = TypeVar("Block", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class Basis:
    """J functions phi_0 .. phi_(J-1) on [0, 1], and J knots s_k whose values theta(s_k) determine
    the coefficients.
    """

    functions: Callable[[Fraction, int], list[float]]
    """s, J -> phi_j(s)."""
    knots: Callable[[int], list[Fraction]]
    """J -> s_k."""
    network: Callable[[int, torch.Generator], nn.Module] | None = None
    """J -> a network u(s), 0 at first, that is added to the functions: phi_j(s) + u_j(s)."""

    def coefficients(self, count: int) -> Float[Tensor, "count count"]:
        """V^-1 with V[k, j] = phi_j(s_k): c = V^-1 theta(s)."""
        values = torch.tensor(
            [self.functions(s, count) for s in self.knots(count)], dtype=torch.float64
        )
        inverse: Tensor = torch.linalg.inv(values)
        return inverse


def constant(s: Fraction, count: int) -> list[float]:
    """phi_j = 1 on [j/J, (j+1)/J) and 0 elsewhere: J groups of equal blocks."""
    here = min(math.floor(s * count), count - 1)
    return [float(j == here) for j in range(count)]


def linear(s: Fraction, count: int) -> list[float]:
    """phi_j(s) = max(0, 1 - abs(s (J-1) - j)), hats on J equidistant knots including both ends; the
    constant 1 for J = 1.
    """
    return [float(max(Fraction(0), 1 - abs(s * (count - 1) - j))) for j in range(count)]


def chebyshev(s: Fraction, count: int) -> list[float]:
    """phi_j(s) = T_j(2s - 1) = cos(j arccos(2s - 1)), polynomials of degree below J."""
    angle = math.acos(2 * s - 1)
    return [math.cos(j * angle) for j in range(count)]


def _centres(count: int) -> list[Fraction]:
    return [Fraction(2 * k + 1, 2 * count) for k in range(count)]


def _equidistant(count: int) -> list[Fraction]:
    if count > 1:
        return [Fraction(k, count - 1) for k in range(count)]
    return [Fraction(1, 2)]


def _extrema(count: int) -> list[Fraction]:
    # where T_(J-1) is 1 or -1: the interpolating polynomials stay near or below 1
    return [Fraction((1 - math.cos(math.pi * s)) / 2) for s in _equidistant(count)]


BASES: dict[str, Basis] = {
    "constant": Basis(constant, _centres),
    "linear": Basis(linear, _equidistant),
    "chebyshev": Basis(chebyshev, _extrema),
    "network": Basis(chebyshev, _extrema, TimeNetwork),
}


class InDepth(nn.Module):
    """theta(s) = sum_j phi_j(s) c_j at the s of one block: the parametrisation of a parameter
    by coefficients c_j. `network` is the trained part of the functions, if any.
    """

    def __init__(self, basis: str, count: int, s: Fraction, network: nn.Module | None):
        super().__init__()
        self.basis = basis
        self.count = count
        self.network = network
        self.move(s)

    def move(self, s: Fraction) -> None:
        """Puts the block at another s."""
        self.s = s
        self._fixed = tuple(BASES[self.basis].functions(s, self.count))

    @property
    def shares(self) -> tuple[float, ...]:
        """phi_j(s) at this block."""
        if self.network is None:
            return self._fixed
        return tuple(self._trained().tolist())

    def _trained(self) -> Tensor:
        assert self.network is not None, "nothing of these functions is trained"
        u: Tensor = self.network(self.s)
        return u + u.new_tensor(self._fixed)

    def forward(self, *coefficients: Tensor) -> Tensor:
        if self.network is not None:  # entry by entry, which autocast leaves in the weights' dtype
            return torch.stack(
                [share * c for share, c in zip(self._trained().unbind(), coefficients, strict=True)]
            ).sum(0)
        terms = [(c, share) for c, share in zip(coefficients, self.shares, strict=True) if share]
        theta, first_share = terms[0]
        if first_share != 1:
            theta = first_share * theta
        for c, share in terms[1:]:
            theta = torch.add(theta, c, alpha=share)
        return theta

    def right_inverse(self, theta: Tensor) -> tuple[Tensor, ...]:
        """c_j = phi_j(s) theta / sum_i phi_i(s)^2, the smallest coefficients with this theta. torch
        calls it when a parameter is set.
        """
        square = sum(share * share for share in self.shares)
        return tuple(theta * (share / square) for share in self.shares)


def blocks_through(
    knots: Sequence[Block], basis: str, blocks: int, generator: torch.Generator | None = None
) -> list[Block]:
    """`blocks` copies of a block with weights theta(s) that interpolate the weights of `knots`:
    theta(s_k) are those of the k-th module.

    So theta has at its knots the properties of the modules: the standard deviation of their
    entries, a gain of 1. Between the knots the squares of the interpolating functions add up to at
    least 1/2 and at most 1 (constant, linear) or 1.1 (chebyshev). Independent entries keep this
    share of their variance. The blocks share the coefficients, each with the shape of its
    parameter, and the basis' network, which is drawn from `generator`. Raises ConfigError for an
    unknown basis.
    """
    kind = look_up("basis of weights in depth", basis, BASES)
    to_coefficients = kind.coefficients(len(knots))
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    network: nn.Module | None = None
    if kind.network is not None:
        network = kind.network(len(knots), generator)
    block = deepcopy(knots[0])
    parameters_of_knots = [dict(knot.named_parameters()) for knot in knots]
    middles = _centres(blocks)
    for path, module in list(block.named_modules()):
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            if path:
                key = f"{path}.{name}"
            else:
                key = name
            values = [parameters[key] for parameters in parameters_of_knots]
            if network is not None:
                network = network.to(values[0])
            theta = InDepth(basis, len(knots), middles[0], network)
            _replace(module, name, values, to_coefficients, theta)
    shared = coefficients_of([block])
    return [copy_to(block, shared, s) for s in middles]


def _replace(
    module: nn.Module,
    name: str,
    values: list[nn.Parameter],
    to_coefficients: Tensor,
    theta: InDepth,
) -> None:
    """Makes a parameter a function of coefficients that interpolate the values."""
    stacked = torch.stack([value.detach() for value in values])
    inverse = to_coefficients.to(stacked.device)
    coefficients = torch.tensordot(inverse, stacked.double(), 1).to(stacked.dtype)
    parametrize.register_parametrization(module, name, theta)
    originals = module.parametrizations[name]  # type: ignore[index]  # a ModuleDict
    for j, coefficient in enumerate(coefficients):
        parameter = nn.Parameter(coefficient.clone(), values[0].requires_grad)
        setattr(originals, f"original{j}", parameter)


def coefficients_of(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """The coefficients and networks of the modules' functions of depth, by identity; empty if all
    weights are free.
    """
    return {
        id(c): c
        for module in modules
        for part in module.modules()
        if isinstance(part, parametrize.ParametrizationList) and isinstance(part[0], InDepth)
        for c in part.parameters()
    }


def copy_to(block: Block, coefficients: dict[int, nn.Parameter], s: Fraction) -> Block:
    """A copy of the block at another s. `coefficients` replace its own, by identity."""
    moved = deepcopy(block, dict(coefficients))
    for part in moved.modules():
        if isinstance(part, InDepth):
            part.move(s)
    return moved
