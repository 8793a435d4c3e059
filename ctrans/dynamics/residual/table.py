"""The table of residuals. A new one is one entry, which models, commands and tests then use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ctrans.dynamics.norm import NORMS, make_norm
from ctrans.dynamics.placement import Placement
from ctrans.dynamics.residual.streams import HyperConnections, ManifoldConnections
from ctrans.dynamics.residual.velocities import DepthScaled, Gain, Residual, TowardsImage
from solvers import ConfigError, look_up, shown


@dataclasses.dataclass(frozen=True)
class ResidualEntry:
    """A residual, defined by its ODE.

    - `make`: from a `GPTConfig` and the sublayer's number, counted from 0, to its residual
    - `ode`, `source`: the equation of a segment, and its source
    - `start`: the default initial value of its gains; None without gains that can be chosen
    - `refuses`: why a placement is invalid with it, or None
    - `counts_blocks`: whether another number of blocks over the same depth-time is another model
    - `streams`: the default number of streams; None for one stream
    - `unit_weights`: whether matrices are normalised along their embedding dimension, at first and
      after each step
    """

    make: Callable[[Any, int], Residual]
    ode: str
    source: str
    start: float | None = None
    refuses: Callable[[Placement], str | None] = lambda placement: None
    counts_blocks: bool = False
    streams: int | None = None
    unit_weights: bool = False


def _scales_nothing(placement: Placement) -> str | None:
    if placement.input_norm:
        return None
    return (
        "scales the output of an input norm, and the placement has none: choose placement pre,"
        " peri or pre_post"
    )


def _leaves_streams(placement: Placement) -> str | None:
    if not placement.state_norm:
        return None
    return "would have a norm around all streams: choose placement pre, peri, output or none"


def _needs_image(placement: Placement) -> str | None:
    if placement.state_norm and not placement.output_norm and not placement.residual_gain:
        return None
    return (
        "moves on the image of a norm around the state with its own step: choose placement post"
        " or pre_post"
    )


RESIDUALS: dict[str, ResidualEntry] = {
    "plain": ResidualEntry(lambda settings, k: Residual(), "dX/dt = v", "He et al. 2015"),
    "layerscale": ResidualEntry(
        lambda settings, k: Gain(settings.width, settings.residual_start),
        "dX/dt = g * v, g by channel",
        "LayerScale, arXiv 2103.17239: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond",
        start=0.1,
    ),
    "rezero": ResidualEntry(
        lambda settings, k: Gain(1, settings.residual_start),
        "dX/dt = a v, a from 0",
        "ReZero, arXiv 2003.04887, whose Transformer shares a in a block; SkipInit, arXiv"
        " 2002.10444, as here one a sublayer",
        start=0.0,
    ),
    "depth_scaled": ResidualEntry(
        lambda settings, k: DepthScaled(k // settings.per_block + 1),
        "dX/dt = N_out f(N_in X/sqrt(l)) in block l",
        "LayerNorm scaling, arXiv 2502.05795",
        refuses=_scales_nothing,
        counts_blocks=True,
    ),
    "ngpt": ResidualEntry(
        lambda settings, k: TowardsImage(make_norm(settings), settings.residual_start),
        "dX/dt = T_X a * (N v - X), a by channel, T_X the projection on the norm's image",
        "nGPT, arXiv 2410.01131, on the sphere where the norm has no gain",
        start=0.05,
        refuses=_needs_image,
        unit_weights=True,
    ),
    "hyper_connections": ResidualEntry(
        lambda settings, k: HyperConnections(settings.width, settings.state_streams, k),
        "X <- (M x I) X, then dX/dt = b x N_out f(N_in (a' x I) X), n streams",
        "hyper-connections, arXiv 2409.19606, the static ones",
        refuses=_leaves_streams,
        counts_blocks=True,
        streams=4,
    ),
    "mhc": ResidualEntry(
        lambda settings, k: ManifoldConnections(settings.width, settings.state_streams, k),
        "the same, M doubly stochastic, a and b positive",
        "manifold-constrained hyper-connections, arXiv 2512.24880, the static ones",
        refuses=_leaves_streams,
        counts_blocks=True,
        streams=4,
    ),
}
"""Residuals by name. `plain` is the usual residual connection, bit for bit."""

ALIASES = {"skipinit": "rezero", "layernorm_scaling": "depth_scaled"}
"""Other names of entries."""


REFUSED = {
    "dynamic_hyper_connections": (
        "mixes, reads and writes by functions of the state, X <- M(X) X, dX/dt = b(X) x f(a(X)'X),"
        " and the theory here needs constant M, a and b. H is then that of f at W'P, growth that of"
        " the product of the M, and stretch |b|. Choose the static hyper_connections or mhc"
    ),
}
"""Known residuals that ctrans does not support, and why."""


def residual_name(name: str) -> str:
    """The entry's name for a name or alias. Raises ConfigError with the nearest name, or with the
    reason why it is not supported.
    """
    if isinstance(name, str) and name in REFUSED:
        raise ConfigError(f"residual {name!r} {REFUSED[name]}")
    look_up("residual", name, {**RESIDUALS, **ALIASES})
    return ALIASES.get(name, name)


def check_image(residual: str, norm: str) -> None:
    """Raises ConfigError for a residual on the image of a norm around the state, if this image has
    no tangent spaces.
    """
    if look_up("residual", residual, RESIDUALS).refuses is not _needs_image:
        return
    with_tangent = [name for name, norm_class in NORMS.items() if norm_class(2, 1e-5).has_tangent]
    if norm not in with_tangent:
        raise ConfigError(
            f"residual {residual!r} moves on the image of the norm around the state, and the image"
            f" of {norm!r} has no tangent spaces: choose norm {', '.join(with_tangent)}"
        )


def check_residual(
    name: str, placements: Sequence[Placement], start: float | None, streams: int | None
) -> None:
    """Raises ConfigError for a placement that the residual does not support, or for options that it
    does not have.
    """
    entry = look_up("residual", name, RESIDUALS)
    for placement in placements:
        reason = entry.refuses(placement)
        if reason is not None:
            raise ConfigError(f"residual {name!r} with placement {placement.name!r} {reason}")
    if start is not None and entry.start is None:
        with_start = [key for key, candidate in RESIDUALS.items() if candidate.start is not None]
        raise _meaningless("residual_init", start, name, with_start)
    if streams is not None and entry.streams is None:
        with_streams = [
            key for key, candidate in RESIDUALS.items() if candidate.streams is not None
        ]
        raise _meaningless("streams", streams, name, with_streams)
    if streams == 1:
        raise ConfigError(
            f"streams = 1 for residual {name!r}: give at least 2, or choose residual plain"
        )


def _meaningless(option: str, value: float, name: str, able: list[str]) -> ConfigError:
    return ConfigError(
        f"{option} = {shown(value)} has no meaning for residual {name!r}: leave it out, or choose"
        f" {', '.join(able)}"
    )
