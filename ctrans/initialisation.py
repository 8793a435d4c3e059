"""Initialisations of weight matrices: a name, a standard deviation, and whether residual writers are scaled down."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ctrans.sublayer import Attention, FeedForward, Sublayer
from solvers import ConfigError
from solvers.errors import look_up


@dataclasses.dataclass(frozen=True)
class Initialisation:
    """Entries N(0, std(fan_in, fan_out)^2) for every matrix of a sublayer; biases zero.

    With `scaled`, matrices that write to the residual stream get a further 1/sqrt(segments) (GPT-2).
    """

    std: Callable[[int, int], float]
    scaled: bool = False


# Kim's settings are stated with the width d; here d is each matrix's fan-in.
INITIALISATIONS: dict[str, Initialisation] = {
    "gpt2": Initialisation(lambda fan_in, fan_out: 0.02, scaled=True),
    "normal": Initialisation(lambda fan_in, fan_out: 0.02),
    "xavier": Initialisation(lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out))),
    "he": Initialisation(lambda fan_in, fan_out: math.sqrt(2 / fan_in)),
    "lecun": Initialisation(lambda fan_in, fan_out: math.sqrt(1 / fan_in)),
    "large": Initialisation(lambda fan_in, fan_out: math.sqrt(10 / fan_in)),
    "small": Initialisation(lambda fan_in, fan_out: math.sqrt(1 / (10 * fan_in))),
}


def get_initialisation(name: str) -> Initialisation:
    """The initialisation of that name; ConfigError with the nearest name otherwise."""
    return look_up("initialisation", name, INITIALISATIONS)


@torch.no_grad()
def initialise(sublayers: Iterable[Sublayer], name: str, generator: torch.Generator) -> None:
    """Draws every matrix of the sublayers' attention and FFN maps from that initialisation; biases become zero.

    Norms keep gain 1 and offset 0. Raises ConfigError for a field that is neither `Attention` nor `FeedForward`.
    """
    rule = get_initialisation(name)
    parts = list(sublayers)
    for sublayer in parts:
        field = sublayer.field
        if not isinstance(field, (Attention, FeedForward)):
            raise ConfigError(f"cannot initialise a field of type {type(field).__name__}: give an Attention or a FeedForward")
        for weight, last in field.matrices():
            std = rule.std(weight.shape[1], weight.shape[0]) / (math.sqrt(len(parts)) if rule.scaled and last else 1.0)
            weight.normal_(0.0, std, generator=generator)
        for module in field.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
