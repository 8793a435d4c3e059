"""Random mixtures of experts for tests of statements, in float64."""

from __future__ import annotations

from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.fields import EXPERTS, ROUTERS, ExpertOptions, MixtureOfExperts


def random_mixture(draw: Draw, *, smooth: bool = False) -> MixtureOfExperts:
    """Two to five experts of any kind and router, of which every token goes through fewer than all,
    with weights of size 1.
    """
    count = 2 + draw.integer(4)
    k = 1 + draw.integer(count - 1)
    router = draw.choice([name for name, rule in ROUTERS.items() if k > 1 or not rule.normalised])
    expert = draw.choice([name for name in EXPERTS if name != "reglu" or not smooth])
    options = ExpertOptions(
        experts=count, top_k=k, shared_experts=draw.integer(2), router=router, expert=expert
    )
    mixture = (
        MixtureOfExperts(3 + draw.integer(4), 4, options=options)
        .double()
        .requires_grad_(requires_grad=False)
    )
    for parameter in mixture.parameters():
        parameter.copy_(draw.normal(*parameter.shape) / 2)
    mixture.use_reference_kernel = True
    return mixture


def describe_mixture(mixture: MixtureOfExperts) -> str:
    """The mixture in a few words, for a case."""
    options = mixture.options
    return (
        f"{options.top_k} of {options.experts} experts, {options.expert}, {options.router}, d ="
        f" {mixture.up.in_features}"
    )


def nearest_switch(mixture: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest token on a switch, and the unit normal that leads across, where biases do not
    enter the choice.
    """
    routing = mixture.route(x.unsqueeze(0))
    rows = mixture.router.weight
    (z,) = routing.logits
    (chosen,) = routing.chosen
    pairs = [(a, b) for a in range(len(z)) for b in range(len(z)) if chosen[a] and not chosen[b]]
    gap, a, b = min((float((z[a] - z[b]) / (rows[a] - rows[b]).norm()), a, b) for a, b in pairs)
    normal = (rows[b] - rows[a]) / (rows[b] - rows[a]).norm()
    return x + gap * normal, normal
