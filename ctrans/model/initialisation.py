"""Initialisations of weight matrices: a standard deviation, and a factor by the matrix's role."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ctrans.dynamics.fields import ExposesWeights, Role
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.functions_of_depth import coefficients_of
from ctrans.dynamics.weights.on_demand import check_present
from solvers import ConfigError, look_up

PATH_LENGTH: dict[Role, float] = {
    "query": 4,
    "key": 4,
    "value": 4,
    "out": 4,
    "up": 2,
    "down": 2,
    "gate": math.inf,
    "router": math.inf,
}
"""m: the number of matrices in the product with this one. Attention's sensitivity is bounded by
|W_O||W_Q||W_K||W_V| (Emadi, theorem 5.1), the FFN's by |W_2||W_1|. A gate or router is not scaled:
the other matrices make the product O(1/N) without it.
"""


def _residual(role: Role, blocks: float) -> float:
    """(2 N)^(-1/2) for matrices that write to the residual stream: N blocks add 2 N terms
    (GPT-2).
    """
    if role in ("out", "down"):
        return float((2 * blocks) ** -0.5)
    return 1.0


def _deepnorm(role: Role, blocks: float) -> float:
    """beta = (8 N)^(-1/4) for all but W_Q and W_K (DeepNet, decoder only; used with alpha = (2
    N)^(1/4)).
    """
    if role in ("query", "key"):
        return 1.0
    return float((8 * blocks) ** -0.25)


def _path_length(role: Role, blocks: float) -> float:
    """N^(-1/m), m maps in the path, so that a block's sensitivity is O(1/N) (Emadi, theorem
    6.2).
    """
    return float(blocks ** (-1 / PATH_LENGTH[role]))


def _uniform_attention(role: Role, blocks: float) -> float:
    """W_Q = W_K = 0: each token attends to all visible tokens equally (Xiong, section 3.3)."""
    if role in ("query", "key"):
        return 0.0
    return 1.0


@dataclasses.dataclass(frozen=True)
class Initialisation:
    """Entries N(0, (gain(role, N) std(fan_in, fan_out))^2) for every matrix of a sublayer, N the
    number of blocks; biases zero.
    """

    std: Callable[[float, float], float]
    gain: Callable[[Role, float], float] = lambda role, blocks: 1.0
    of_xavier: bool = False
    """Whether values, outputs and the FFN have Xavier's variance at any depth, as Xiong's theorem 1
    assumes.
    """


def _fixed(fan_in: float, fan_out: float) -> float:
    return 0.02


def _xavier(fan_in: float, fan_out: float) -> float:
    return math.sqrt(2 / (fan_in + fan_out))


# Kim's settings are stated with the width d; here d is each matrix's fan-in.
INITIALISATIONS: dict[str, Initialisation] = {
    "gpt2": Initialisation(_fixed, _residual),
    "normal": Initialisation(_fixed),
    "xavier": Initialisation(_xavier, of_xavier=True),
    "he": Initialisation(lambda fan_in, fan_out: math.sqrt(2 / fan_in)),
    "lecun": Initialisation(lambda fan_in, fan_out: math.sqrt(1 / fan_in)),
    "large": Initialisation(lambda fan_in, fan_out: math.sqrt(10 / fan_in)),
    "small": Initialisation(lambda fan_in, fan_out: math.sqrt(1 / (10 * fan_in))),
    "deepnorm": Initialisation(_xavier, _deepnorm),
    "path_length": Initialisation(_xavier, _path_length),
    "xiong": Initialisation(_xavier, _uniform_attention, of_xavier=True),
}


def get_initialisation(name: str) -> Initialisation:
    """The initialisation of that name. Raises ConfigError with the nearest name for an unknown
    one.
    """
    return look_up("initialisation", name, INITIALISATIONS)


@torch.no_grad()
def initialise(
    sublayers: Iterable[Sublayer],
    name: str,
    generator: torch.Generator,
    *,
    blocks: float,
    wider: float = 1.0,
    power: float = 0.0,
) -> None:
    """Draws every matrix of the sublayers' attention and FFN maps from this initialisation, and
    sets the biases of their linear maps to zero.

    `blocks` is the number of blocks for rules that depend on it. The standard deviation is that of
    a model 1/`wider` times as wide, times wider^power. Norms keep gain 1 and offset 0.
    Raises ConfigError for a field that does not expose its matrices, and for weights that are
    functions of depth, as a block's own weights cannot be drawn.
    """
    rule = get_initialisation(name)
    sublayers = list(sublayers)
    if coefficients_of(sublayers):
        raise ConfigError(
            "these weights are functions of depth: initialise the blocks at their knots first"
        )
    for sublayer in sublayers:
        check_present(sublayer, "initialised")
        field = sublayer.field
        if not isinstance(field, ExposesWeights):
            raise ConfigError(
                f"cannot initialise a field of type {type(field).__name__}: it does not expose its"
                " weight matrices by `matrices()`"
            )
        for matrix in field.matrices():
            fan_out, fan_in = matrix.weight.shape
            std = rule.std(fan_in / wider, fan_out / wider) * wider**power
            gain = rule.gain(matrix.role, blocks)
            matrix.weight.normal_(0.0, gain * std, generator=generator)
        for module in sublayer.field.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
