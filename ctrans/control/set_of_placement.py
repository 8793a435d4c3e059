"""The admissible set of a placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.control.admissible import Supremum, VelocitySet
from ctrans.control.last_map import FrobeniusBall, LastMapDecay
from ctrans.control.regularization import GainDecay, KineticCost
from ctrans.control.sets_by_norm import image_of, reachable
from ctrans.control.tangent import TangentSection, TangentSpace, WholeSpace
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.placement import Placement, get_placement
from solvers import ConfigError, Finite

Argument = TypeVar("Argument")


def admissible_set(
    norm: Norm | None,
    placement: str | Placement,
    *,
    state: Annotated[TokenRows, Finite] | None = None,
    active_channels: Bool[Tensor, " width"] | None = None,
    features: Annotated[Float[Tensor, "*batch tokens features"], Finite] | None = None,
    radius: float | None = None,
    last_map_decay: float | None = None,
    gain_decay: float | None = None,
    kinetic: float | None = None,
) -> Supremum:
    """The velocities that a placement allows: its output norm's image, a tangent space of its state
    norm's image, or the whole space.

    - `norm`: that norm; None if the placement has neither
    - `state`: X, which a tangent space needs
    - `active_channels`: mask of the channels with nonzero residual gain; None for all
    - `features`: input of the last linear map, which `radius` and `last_map_decay` need
    - `radius`: bounds |W|_F of the last linear map
    - `last_map_decay`: lam of a running cost lam/2 |W|_F^2 for that map
    - `gain_decay`: lam of a running cost lam/2 (|gamma|^2 + |beta|^2) for an output norm's trained
      gains and offsets
    - `kinetic`: lam of a running cost lam/2 |f|^2, in any placement

    DeepNorm's division by alpha changes no tangent space.

    >>> admissible_set(LayerNorm(768), "peri").support(P)

    Raises ConfigError, naming the placement, if an argument is missing or options contradict each
    other.
    """
    if isinstance(placement, str):
        placement = get_placement(placement)
    weights = {"features": features, "radius": radius, "last_map_decay": last_map_decay}
    contradiction = _contradiction(placement, state, weights, gain_decay, kinetic)
    if contradiction is not None:
        raise ConfigError(f"placement {placement.name!r} {contradiction}")
    if last_map_decay is not None:
        h = _needed(placement, features, "features, the input of its last linear map")
        return LastMapDecay(h, last_map_decay)
    if gain_decay is not None:
        return GainDecay(_needed(placement, norm, "norm, its output norm"), gain_decay)
    velocities: VelocitySet
    if placement.output_norm:
        norm = _needed(placement, norm, "norm, its output norm")
        if kinetic is None:
            velocities = image_of(norm)
        else:
            velocities = reachable(norm)
    elif placement.state_norm:
        norm = _needed(placement, norm, "norm, its state norm")
        x = _needed(placement, state, "state, for the tangent space of its state norm's image")
        if active_channels is None:
            velocities = TangentSpace(norm, x)
        else:
            velocities = TangentSection(norm, x, active_channels)
    elif radius is not None:
        h = _needed(placement, features, "features, the input of its last linear map")
        velocities = FrobeniusBall(h, radius)
    else:
        velocities = WholeSpace()
    if kinetic is None:
        return velocities
    return KineticCost(velocities, kinetic)


def _needed(placement: Placement, value: Argument | None, what: str) -> Argument:
    """The value. Raises ConfigError if it is None."""
    if value is None:
        raise ConfigError(f"placement {placement.name!r} needs {what}: pass it")
    return value


def _contradiction(
    placement: Placement,
    state: Tensor | None,
    weights: Mapping[str, object],
    gain_decay: float | None,
    kinetic: float | None,
) -> str | None:
    """The first contradiction of the arguments; None if there is none."""
    weight_options = [name for name, value in weights.items() if value is not None]
    listed = ", ".join(weight_options)
    if placement.output_norm and placement.state_norm:
        return (
            "has an output norm and a state norm, for which no closed form is known: choose one"
            " with at most one of them"
        )
    if state is not None and not placement.state_norm:
        return "allows the same velocities at every state: leave state out"
    if weight_options and placement.output_norm:
        return (
            "has an output norm, which removes the scale of the last linear map: leave"
            f" {listed} out; gain_decay and kinetic apply"
        )
    if weight_options and placement.state_norm:
        return (
            "projects the output of its last linear map on a tangent space: leave"
            f" {listed} out; kinetic applies"
        )
    if weight_options == ["features"]:
        return "got features without a bound on their map: add radius or last_map_decay"
    if "radius" in weight_options and "last_map_decay" in weight_options:
        return "got both radius and last_map_decay: choose one"
    if gain_decay is not None and not placement.output_norm:
        return (
            "has no output norm whose gains could decay (a state norm's are not covered): leave"
            " gain_decay out; kinetic applies"
        )
    if "last_map_decay" in weight_options and kinetic is not None:
        return "got two running costs, last_map_decay and kinetic: choose one"
    if gain_decay is not None and kinetic is not None:
        return "got two running costs, gain_decay and kinetic: choose one"
    return None
