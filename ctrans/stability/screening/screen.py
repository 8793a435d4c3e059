"""Screening an architecture before it is trained: Kan's four steps (appendix B), attention sensitivity and initialisation theory.

>>> screening = screen(model, tokens[:, :-1], tokens[:, 1:], EFFORTS["quick"])
>>> screening.score.value, [finding.why for finding in screening.findings]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from ctrans.stability.backward.sensitivity import trajectory
from ctrans.stability.screening.attention import screen_attention, screen_initialisation
from ctrans.stability.screening.backward import screen_backward, screen_transport
from ctrans.stability.screening.case import EFFORTS, Case, Effort, Finding
from ctrans.stability.screening.forward import screen_forward, screen_well_posedness
from ctrans.stability.screening.score import Score, overall
from ctrans.walk import DescribedModel
from solvers import ConfigError, SolveError
from solvers.run import finite

__all__ = ["EFFORTS", "STEPS", "Effort", "Screening", "screen"]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the workflow: what it asks, how it is answered, and whether the score counts it."""

    question: str
    run: Callable[[Case], Finding]
    scored: bool = True


STEPS: dict[str, Step] = {
    "well-posedness": Step("is training a well-posed control problem?", screen_well_posedness),
    "forward": Step("how do hidden states grow?", screen_forward),
    "backward": Step("how do gradients pass?", screen_backward),
    "transport": Step("how far does uncertainty travel?", screen_transport),
    "attention": Step("how sensitive is attention?", screen_attention),
    "initialisation": Step("what does theory say of the initial weights?", screen_initialisation, scored=False),
}


@dataclasses.dataclass(frozen=True)
class Screening:
    """All findings about one model, in the order of `STEPS`, and the score. Every field suits JSON.

    `broken` is the first segment whose state is not finite, None where all are.
    """

    placement: str
    norm: str
    dt: float
    initialisation: str | None
    tokens: int
    broken: int | None
    score: Score
    findings: dict[str, Finding]


def screen(
    model: DescribedModel,
    tokens: Int[Tensor, "batch tokens"],
    targets: Int[Tensor, "batch tokens"],
    effort: Effort = EFFORTS["full"],
    *,
    other: Int[Tensor, "batch tokens"] | None = None,
    seed: int = 0,
    trained: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Screening:
    """Every step of `STEPS` at the model's weights as they are, along its trajectory on these tokens, and the score.

    The model is a GPT, or another library's (`ctrans.interop`). `other` is another text of the same shape, for the transport step.
    `trained` weights are not those of the configuration's initialisation. A step that cannot handle the model says so in its
    finding, and the others run; where a state is not finite, they run as far as it is. `progress(step)` is called as each step
    is done. Raises ConfigError where tokens, targets and the other text do not have one shape.
    """
    for name, value in (("targets", targets), ("other text", tokens if other is None else other)):
        if value.shape != tokens.shape:
            raise ConfigError(f"the {name} has shape {tuple(value.shape)} and the tokens {tuple(tokens.shape)}: give one shape")
    with torch.no_grad():
        states = trajectory(model.depth, model.embed(tokens))
    case = Case(model, tokens, targets, states, other, effort, seed, trained)
    findings = {}
    for name, step in STEPS.items():
        findings[name] = _attempt(step, case)
        if progress is not None:
            progress(name)
    return Screening(
        model.config.placement,
        model.config.norm,
        model.config.dt,
        model.config.initialisation,
        tokens.numel(),
        next((k - 1 for k, x in enumerate(states) if not finite(x)), None),
        overall({name: findings[name].ingredients for name, step in STEPS.items() if step.scored}),
        findings,
    )


def _attempt(step: Step, case: Case) -> Finding:
    try:
        return step.run(case)
    except (ConfigError, SolveError) as error:
        return Finding("n/a", "–", str(error))
