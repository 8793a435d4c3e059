"""What a residual makes of a sublayer's Hamiltonian: velocities r = gain W v are certified as the v that they are made of.

H over {W v : v in V} at P is H over V at W'P, so that whatever set the norms make of V, its certificate at the pulled costate is that of
the velocities. The gain is what it is: over a trained and undecayed one the value grows as it does (`residual-gain` in THEORY.md).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ctrans.sublayer import Sublayer
from solvers import ConfigError


def costate_of_map(sublayer: Sublayer, p: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
    """The costate at which the norms' set is certified: gain W'P behind an output norm, W'P where no norm stands behind the map.

    Inside a norm around the state it is P: an invertible W leaves the tangent space as it is. A W of 0 makes every velocity 0 while it
    lasts, and is trained: what is certified then is what the sublayer may do as soon as W is not 0, as if it were 1.
    """
    if sublayer.output_norm is not None:
        return sublayer.pulled(p)
    if sublayer.state_norm is not None or silent(sublayer):
        return p
    return p if sublayer.residual is None else sublayer.residual.pull(p)


def pulled_to_map(sublayer: Sublayer, pulled: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
    """W'T'P of T'P, T being what a norm around the state does; as `costate_of_map` leaves it where there is none."""
    inside = sublayer.state_norm is not None and sublayer.residual is not None and not silent(sublayer)
    return sublayer.residual.pull(pulled) if inside and sublayer.residual is not None else pulled


def cost_factor(sublayer: Sublayer) -> float:
    """c^2 with |r|^2 = c^2 |v|^2 for every v, as which a kinetic cost of velocities is one of the set's.

    Raises ConfigError for a residual that stretches v by direction.
    """
    residual = sublayer.residual
    gain = sublayer.gain if sublayer.output_norm is not None else 1.0
    if residual is None or sublayer.state_norm is not None or silent(sublayer):
        return gain**2
    if residual.stretch is None:
        raise ConfigError(
            f"the residual {type(residual).__name__} stretches velocities by direction, and a kinetic cost of those has no closed form "
            "here: leave --kinetic out, or choose residual plain or rezero"
        )
    return (gain * residual.stretch) ** 2


def silent(sublayer: Sublayer) -> bool:
    """Whether its residual makes every velocity 0 as it is."""
    return sublayer.residual is not None and sublayer.residual.largest == 0


def factor_in_words(sublayer: Sublayer) -> str | None:
    """What stands before v in r, for a certificate's words; None where nothing does."""
    if sublayer.residual is not None and sublayer.residual.words is not None:
        return sublayer.residual.words
    return f"{sublayer.gain:g} f" if sublayer.output_norm is not None and sublayer.gain != 1 else None


def trains_gains(sublayer: Sublayer) -> bool:
    """Whether gains are trained beside both factors of the map, which a decay of those does not hold: of an input norm, or the residual."""
    return sublayer.input_norm is not None or (sublayer.residual is not None and sublayer.residual.gains is not None)
