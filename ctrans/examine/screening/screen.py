"""Screening an architecture before training: Kan's four steps (appendix B), attention sensitivity
and initialisation theory.

>>> screening = screen(model, tokens[:, :-1], tokens[:, 1:], "quick")
>>> screening.flags, [step.why for step in screening.steps.values()]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from ctrans.base.as_found import leaving_as_found
from ctrans.base.option import Seed
from ctrans.examine.diagnosis.diagnose import Diagnosis, lane_of_attempts
from ctrans.examine.screening.attention import plan_attention, plan_initialisation
from ctrans.examine.screening.backward import plan_backward, plan_transport
from ctrans.examine.screening.case import EFFORTS, Case, Effort, LaneName, StepPlan, StepVerdict
from ctrans.examine.screening.forward import plan_forward, plan_well_posedness
from ctrans.examine.screening.screening_checks import (
    MEASURED_IN,
    QUESTIONS,
    STEPS,
    ScreeningStep,
    findings_of,
)
from ctrans.examine.screening.updates import plan_updates
from ctrans.measure.findings import Finding
from ctrans.measure.missing import tried
from ctrans.measure.walk import Attempt, DescribedModel, Instrument, Lane, own_loss, walk_lanes
from solvers import ConfigError, look_up, shown

__all__ = ["EFFORTS", "STEPS", "Effort", "Screening", "ScreeningStep", "screen"]


PLANS = {
    "well-posedness": plan_well_posedness,
    "forward": plan_forward,
    "backward": plan_backward,
    "transport": plan_transport,
    "attention": plan_attention,
    "updates": plan_updates,
    "initialisation": plan_initialisation,
}
for _name, _plan in PLANS.items():
    STEPS[_name] = ScreeningStep(QUESTIONS[_name], _plan, MEASURED_IN.get(_name, ()))


@dataclasses.dataclass(frozen=True)
class Screening:
    """The result of a screening of one model. All fields can be written as JSON.

    - `broken`: the first segment whose state is not finite, None if all are
    - `steps`: the verdict of each step that applies to the model, in the order of `STEPS`
    - `missing`: why the other steps do not apply
    - `diagnosis`: the diagnosis from the same walk
    """

    placement: str
    norm: str
    dt: float
    initialisation: str | None
    tokens: int
    broken: int | None
    steps: dict[str, StepVerdict]
    diagnosis: Diagnosis
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def flags(self) -> dict[str, str]:
        """The quantities of all steps outside their limits, with the verdict."""
        return {name: word for step in self.steps.values() for name, word in step.flags.items()}

    @property
    def findings(self) -> list[Finding]:
        """The same as findings, most severe first. Findings about single parts are in
        `diagnosis`.
        """
        return findings_of({name: step.quantities for name, step in self.steps.items()})


@leaving_as_found
def screen(
    model: DescribedModel,
    tokens: Tensor,
    targets: Any,
    effort: str | Effort = "full",
    *,
    other: Tensor | None = None,
    seed: Seed = 0,
    trained: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Screening:
    """Runs each step of `STEPS` at the model's current weights, in one forward and backward walk of
    the tokens.

    - `model`: a GPT, a model of another library, or any module (`ctrans.open_model`)
    - `tokens`, `targets`: token ids, or the inputs and targets of the model's own loss (images,
      features)
    - `effort`: a name of `EFFORTS`, or an `Effort`
    - `other`: another text of the same shape, for the transport step
    - `seed`: seed of perturbations and of start vectors
    - `trained`: whether the weights differ from the configuration's initialisation
    - `progress`: called with a word after each segment forward and backward, so twice for each
      segment.
      Without a loss there is no backward walk, and those calls come at the end

    A step that does not support the model has its reason in `missing`, and the others run. If a
    state is not finite, steps use the states before it. Raises ConfigError if tokens, targets and
    the other text have different shapes, or the effort is unknown.
    """
    of_the_tokens_shape: dict[str, Any] = {}
    if own_loss(model) is None:  # the targets of a loss of its own may have any shape
        of_the_tokens_shape["targets"] = targets
    if other is not None:
        of_the_tokens_shape["other text"] = other
    for name, value in of_the_tokens_shape.items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"the {name} is {shown(value)}: give a tensor of the tokens' shape")
        if value.shape != tokens.shape:
            raise ConfigError(
                f"the {name} has shape {tuple(value.shape)} and the tokens {tuple(tokens.shape)}:"
                " give the same shape"
            )
    state = model.embed(tokens[:1])
    if state.dtype not in (torch.float32, torch.float64):
        kind = str(state.dtype).removeprefix("torch.")
        raise ConfigError(
            f"dtype {kind!r} is too coarse for singular values and certificates: use float32 or"
            " float64"
        )
    if isinstance(effort, str):
        chosen = look_up("effort", effort, EFFORTS)
    else:
        chosen = effort
    case = Case(model, tokens, targets, other, chosen, int(seed), trained)
    missing: dict[str, str] = {}
    plans = {name: tried(missing, name, step.plan, case) for name, step in STEPS.items()}
    lanes = _lanes(case, plans, missing)
    if progress is None:
        walk_lanes(model, lanes, progress=None)
    else:
        walk_lanes(model, lanes, progress=lambda k: progress(f"segment {k}"))
        if all(lane.targets is None for lane in lanes):
            for _ in model.depth.sublayers:
                progress("no way back")
    steps: dict[str, StepVerdict] = {}
    for name, plan in plans.items():
        if plan is not None:
            verdict = tried(missing, name, plan.conclude)
            if verdict is not None:
                steps[name] = verdict
    return Screening(
        model.config.placement,
        model.config.norm,
        model.config.dt,
        model.config.initialisation,
        tokens.numel(),
        case.broken,
        steps,
        case.examination.conclude(missing.get("backward", "left out")),
        {name: missing[name] for name in STEPS if name in missing},
    )


def _lanes(case: Case, plans: Mapping[str, StepPlan | None], missing: dict[str, str]) -> list[Lane]:
    """The lanes of the walk with all instruments. A lane is a part of the text that goes through
    the model with its own instruments. An instrument that a step needs files its failure under the
    step's name in `missing`. Lanes of the same tokens are merged.

    A lane's tokens are the first tokens of any longer lane, so equal shapes mean equal tokens.
    """
    by_lane: dict[LaneName, list[Attempt]] = {name: [] for name in get_args(LaneName)}
    unread: dict[str, str] = {}  # the steps that need these instruments fail without them
    by_lane["text"] += [
        Attempt(case.reach, unread, "reach"),
        Attempt(case.bounds, unread, "bounds"),
        *case.examination.whole.values(),
    ]
    if case.shared_graphs is not None:
        graphs = Attempt(case.shared_graphs, unread, "graphs")
        # other instruments use the graphs, so they come first in their lane
        if case.sequences("several") == case.sequences("part"):
            by_lane["several"].append(graphs)
        else:
            by_lane["part"].append(graphs)
    for step, plan in plans.items():
        if plan is not None:
            for name, instruments in plan.instruments.items():
                by_lane[name] += [_needed(instrument, missing, step) for instrument in instruments]
    together: dict[torch.Size, LaneName] = {}
    for name in get_args(LaneName):
        first = together.setdefault(case.batch(name)[0].shape, name)
        if first != name:
            by_lane[first] += by_lane.pop(name)
    return [
        lane_of_attempts(case.model, *case.batch(name), attempts)
        for name, attempts in by_lane.items()
        if attempts
    ]


def _needed(instrument: Instrument, missing: dict[str, str], step: str) -> Attempt:
    """The instrument, which files its failure as that of the step if the step needs it."""
    if isinstance(instrument, Attempt):
        return instrument
    return Attempt(instrument, missing, step)
