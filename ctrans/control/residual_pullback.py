"""The effect of a residual on a sublayer's Hamiltonian: H of velocities r = gain W v is that of the
v, at a pulled costate.

H over {W v : v in V} at P is H over V at W'P, for any set V. So the certificate of V at the pulled
costate is that of the velocities W v. The gain is fixed: H is proportional to one that is trained
without decay (`residual-gain` in THEORY.md).
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Bool, Float
from torch import Tensor, nn

from ctrans.base.shapes import StreamRows, TokenRows, UnbatchedRows
from ctrans.control.admissible import VelocitySet, verdict_of
from ctrans.control.certificate import Certificate, SearchedFor, certify
from ctrans.control.regularization import Regularization
from ctrans.control.sets_by_norm import image_of, reachable
from ctrans.control.step_image import SectionImage
from ctrans.control.tangent import LinearSpace
from ctrans.dynamics.norm import SphereNorm
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk.passes import value_and_pullback
from solvers import ConfigError


def costate_of_map(sublayer: Sublayer, p: StreamRows) -> TokenRows:
    """The costate at which the norms' set is certified: gain W'P behind an output norm, W'P if no
    norm follows the map.

    Inside a norm around the state it is P. An invertible W leaves the tangent space unchanged, and
    gains that are 0 in some channels leave a section of it (`active_channels`), which takes P too.
    A W of 0 makes every velocity 0 at present, but it is trained: the certificate takes W = 1, for
    the velocities as soon as W is not 0.
    """
    if sublayer.output_norm is not None:
        return sublayer.pulled(p)
    if sublayer.state_norm is not None or has_zero_gain(sublayer):
        return p
    return sublayer.residual.pull(p)


def active_channels(sublayer: Sublayer) -> Bool[Tensor, " width"] | None:
    """The channels that a sublayer can change inside its norm around the state; None for all, or if
    its W is 0.
    """
    gains = sublayer.residual.gains
    if sublayer.state_norm is None or gains is None or has_zero_gain(sublayer):
        return None
    active = gains.detach() != 0
    if active.all():
        return None
    return active


def reachable_set(sublayer: Sublayer, x: UnbatchedRows, *, kinetic: bool) -> VelocitySet:
    """The possible states after a step from X, on the norm around the state; with its inside for a
    `kinetic` cost.
    """
    norm = sublayer.state_norm
    active = active_channels(sublayer)
    assert norm is not None, "a norm stands around the state"
    if active is not None:
        if not isinstance(norm, SphereNorm):
            raise ConfigError(
                "some of the residual's gains are 0, inside a norm around the state whose image is"
                " no ellipsoid: its section has no certificate; prune these channels, or give them"
                " a small gain"
            )
        return SectionImage(norm, x, active)
    if kinetic:
        return reachable(norm)
    return image_of(norm)


def raw_costate(sublayer: Sublayer, space: LinearSpace, P: UnbatchedRows) -> UnbatchedRows:
    """W'T'P at P of `costate_of_map`, T being the placement's map of a raw output: the identity, or
    the (oblique) projection of `Norm.tangent`. Without a norm around the state P includes W'.
    """
    _, pulled = value_and_pullback(space.chart(P).velocity, P, P)
    inside = sublayer.state_norm is not None and not has_zero_gain(sublayer)
    if inside:
        return sublayer.residual.pull(pulled)
    return pulled


def cost_factor(sublayer: Sublayer) -> float:
    """c^2 with |r|^2 = c^2 |v|^2 for every v: a kinetic cost of r is c^2 times that of v.

    Raises ConfigError for a residual that stretches v by direction.
    """
    residual = sublayer.residual
    if sublayer.output_norm is not None:
        gain = sublayer.gain
    else:
        gain = 1.0
    if sublayer.state_norm is not None or has_zero_gain(sublayer):
        return gain**2
    if residual.stretch is None:
        raise ConfigError(
            f"the residual {type(residual).__name__} stretches velocities by direction, so a"
            " kinetic cost has no closed form: leave --kinetic out, or choose residual plain or"
            " rezero"
        )
    return (gain * residual.stretch) ** 2


def has_zero_gain(sublayer: Sublayer) -> bool:
    """Whether the residual makes every velocity 0 at present."""
    return sublayer.residual.largest == 0


def factor_formula(sublayer: Sublayer) -> str | None:
    """The factor of v in r, for a certificate's words; None if it is 1."""
    if sublayer.residual.words is not None:
        return sublayer.residual.words
    if sublayer.output_norm is not None and sublayer.gain != 1:
        return f"{sublayer.gain:g} f"
    return None


def trains_gains(sublayer: Sublayer) -> bool:
    """Whether trained gains multiply the two factors of the map: those of an input norm, or of the
    residual.
    """
    norm = sublayer.input_norm
    norm_has_gains = norm is not None and _has_parameters(norm)
    return norm_has_gains or _has_parameters(sublayer.residual)


def has_unbounded_gains(sublayer: Sublayer) -> bool:
    """Whether the residual has gains that are trained without a limit. H is proportional to
    them.
    """
    residual = sublayer.residual
    return not residual.bounded and _has_parameters(residual)


def _has_parameters(module: nn.Module) -> bool:
    return len(list(module.parameters())) > 0


def assuming_bounded_gains(sublayer: Sublayer, certificate: Certificate) -> Certificate:
    """The certificate, with the residual's bounded gains as an assumption of its verdict if H is
    proportional to them.
    """
    if certificate.verdict != "well-posed" or not has_unbounded_gains(sublayer):
        return certificate
    return replace(certificate, verdict=verdict_of(finite=True, bounded_gains=True))


def check_gain_decay(sublayer: Sublayer, regularization: Regularization) -> None:
    """Raises ConfigError for a decay of norms' gains if the residual's own gains are trained too:
    it does not bound those.
    """
    if regularization.gain_decay is None:
        return
    if has_unbounded_gains(sublayer):
        raise ConfigError(
            "a decay of norms' gains does not hold those of the residual"
            f" {type(sublayer.residual).__name__}, which H grows with: leave --gain-decay out, or"
            " choose residual plain"
        )


def support_towards_image(sublayer: Sublayer, x: TokenRows, p: TokenRows) -> float:
    """sup of -<P, r> over r = a * (u - X), u on the image of the residual's own norm: H_N(Q) + <Q,
    X>, Q = a * P.
    """
    assert sublayer.image is not None, "the residual has a norm of its own"
    q = sublayer.pulled(p)
    return float(image_of(sublayer.image).support(q).sum() + (q * x).sum())


def certify_towards_image(
    sublayer: Sublayer,
    x: UnbatchedRows,
    p: UnbatchedRows,
    features: Float[Tensor, "tokens features"],
    regularization: Regularization,
    *,
    search: SearchedFor = "gains",
) -> Certificate:
    """The certificate of velocities T_X a * (u - X), u on the image of the residual's own norm.

    H(P) = H_N(Q) + <Q, X> at Q = a * T_X'P, with H_N that of the norm's image behind an output
    norm: finite and attained for the present gains and steps a. The discrete step's next states are
    a closed subset of the outer norm's image, so its H is finite too. Raises ConfigError for a
    regularization.
    """
    norm = sublayer.image
    around = sublayer.state_norm
    residual = sublayer.residual
    assert norm is not None, "the residual has a norm"
    assert around is not None, "its placement has a norm around the state"
    running_costs = [
        name
        for name, value in vars(regularization).items()
        if value is not None and name != "weight_decay"
    ]
    if running_costs:
        raise ConfigError(
            "a residual that moves towards a norm's image already bounds its velocities: leave"
            f" {', '.join(running_costs)} out"
        )
    _, tangent_part = value_and_pullback(lambda f: around.tangent(x, f), p, p)
    q = residual.pull(tangent_part)
    of_image = certify(image_of(norm), q, features=features, search=search)
    offset = float((q * x).sum())
    certificate = replace(
        of_image,
        words=f"{residual.words}, f in: {of_image.words}",
        hamiltonian=of_image.hamiltonian + offset,
    )
    if of_image.velocities is not None:
        ascent = replace(of_image.velocities, best=of_image.velocities.best + offset)
        certificate = replace(certificate, velocities=ascent)
    if of_image.ceiling is not None:
        certificate = replace(certificate, ceiling=of_image.ceiling + offset)
    return certificate
