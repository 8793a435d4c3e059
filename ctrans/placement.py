"""The seven placements of normalisation, by equation: which norms act where.

Names differ between papers and libraries ("sandwich" means three things), so a placement here is which of three norms are on:
N_in before the sublayer's map f, N_out after it, N_state around the residual sum (Kim's positions A, B and C).
"""

from __future__ import annotations

import dataclasses

from solvers.errors import look_up


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which norms surround a sublayer's map f, and what follows for the model around it.

    With raw velocity r(X) = N_out f(N_in X), each norm only where it is on, the discrete step is X + dt r(X), or
    N_state(X + dt r(X)) where `state_norm` is on; the ODE's velocity is r, or its part tangent to N_state's image.
    """

    name: str
    input_norm: bool
    output_norm: bool
    state_norm: bool
    velocity: str
    step: str
    seen_in: str
    residual_gain: bool = False
    """Whether f is divided by DeepNorm's alpha."""

    @property
    def final_norm(self) -> bool:
        """Whether a norm stands before the head: everywhere but where the state itself is normalised (Xiong, table 1)."""
        return not self.state_norm


PLACEMENTS: dict[str, Placement] = {
    placement.name: placement
    for placement in (
        Placement("none", False, False, False, "f(X)", "X + dt v", "no normalisation"),
        Placement("pre", True, False, False, "f(N_in X)", "X + dt v", "GPT-2, Llama"),
        Placement("peri", True, True, False, "N_out f(N_in X)", "X + dt v", "Gemma 2 and 3"),
        Placement("output", False, True, False, "N_out f(X)", "X + dt v", "OLMo 2"),
        Placement("post", False, False, True, "tangent part of f(X)", "N(X + dt f(X))", "original Transformer, BERT"),
        Placement("pre_post", True, False, True, "tangent part of f(N_in X)", "N(X + dt f(N_in X))", "Kim's A+C"),
        Placement(
            "deepnorm", False, False, True, "tangent part of f(X)/alpha", "N(X + dt f(X)/alpha)", "DeepNet", residual_gain=True
        ),
    )
}


def get_placement(name: str) -> Placement:
    """The placement of that name; ConfigError with the nearest name otherwise."""
    return look_up("placement", name, PLACEMENTS)
