"""Section 9: the slope of a mixture of experts, and the distance to a switch."""

from __future__ import annotations

import torch

from ctrans.base.draw import Draw
from ctrans.theory.random_experts import describe_mixture, nearest_switch, random_mixture
from ctrans.theory.statement import Trial, Trials, at_most, dense_jacobian, statement

SECTION = 9


@statement(
    "experts-slope",
    "ctrans",
    "between switches |df/dx| <= max_e L_e + max_e B_e max_e |w_e| + L_shared, w_e the router's"
    " rows",
    share=0.5,
    printed="the same for two tokens wherever they are",
)
def slope(draw: Draw, *, printed: bool) -> Trial:
    """The largest singular value of the dense Jacobian against the constant between switches.

    Printed: |f(y) - f(x)|/|y - x| across the nearest switch against the same constant.
    """
    mixture = random_mixture(draw)
    if printed:
        on, normal = nearest_switch(mixture, draw.normal(mixture.up.in_features))
        x = (on - 1e-6 * normal).unsqueeze(0)
        y = (on + 1e-6 * normal).unsqueeze(0)
        constant = mixture.lipschitz_between_switches(float(torch.maximum(x.norm(), y.norm())))
        return at_most(
            (mixture(y) - mixture(x)).norm() / (y - x).norm(),
            constant,
            f"{describe_mixture(mixture)}: across a switch",
        )
    x = draw.of_any_size(1, mixture.up.in_features)
    jacobian = dense_jacobian(mixture, x)[0, :, 0]
    return at_most(
        torch.linalg.matrix_norm(jacobian, 2),
        mixture.lipschitz_between_switches(float(x.norm())),
        describe_mixture(mixture),
    )


@statement(
    "experts-distance",
    "ctrans",
    "a token goes through the same experts up to the distance min (z_e - z_e')/|w_e - w_e'|, e"
    " chosen and e' not, and no further",
    0.0,
)
def distance(draw: Draw) -> Trials:
    """30 tokens at the distance to the switch go where x goes, and the one just beyond the plane
    goes elsewhere.
    """
    mixture = random_mixture(draw)
    x = draw.normal(1, mixture.up.in_features)
    far = float(mixture.distance_to_switch(x))
    around = draw.normal(30, mixture.up.in_features)
    around = x + far * (1 - 1e-9) * around / around.norm(dim=-1, keepdim=True)
    here = mixture.route(x).chosen
    on, normal = nearest_switch(mixture, x[0])
    beyond = mixture.route((on + 1e-9 * normal).unsqueeze(0)).chosen
    case = describe_mixture(mixture)
    return [
        Trial(
            float((mixture.route(around).chosen != here).any()),
            f"{case}: another choice nearer than {far:.3g}",
        ),
        Trial(float(torch.equal(beyond, here)), f"{case}: the same choice beyond {far:.3g}"),
    ]
