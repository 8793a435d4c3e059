"""Is training a model a well-posed control problem? The certificate of each segment at the costates
of a text.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ctrans.base.as_found import leaving_as_found
from ctrans.base.old_names import OldReasons
from ctrans.control.admissible import VERDICTS, Posedness, verdict_of
from ctrans.control.checked_segments import CheckedSegments, weakest
from ctrans.control.costate import Costate, continuous_or_discrete, costate
from ctrans.control.costate_error import errors_of, lost_segments
from ctrans.control.decay_threshold import DecayThreshold, largest, with_evidence
from ctrans.control.model_threshold import (
    ATOL,
    RTOL,
    costate_of_raw_output,
    factors_of_model,
    margins_of,
    why_contradicted,
    why_no_threshold,
    with_margins,
)
from ctrans.control.outer_code import WAY
from ctrans.control.own_pass import OpenedModel, OwnLoss, own_loss
from ctrans.control.regularization import Regularization
from ctrans.control.residual_pullback import has_zero_gain
from ctrans.control.scales import at_unit_size, product
from ctrans.control.segment_check import (
    SegmentCheck,
    admissible_at,
    at_field,
)
from ctrans.control.shown_factors import Factors, path_of, with_best_rows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.norm import RMSNorm
from ctrans.dynamics.placement import Placement
from ctrans.measure.walk import Model, SegmentCallback
from solvers import ConfigError


@dataclass(frozen=True)
class ModelCheck:
    """The certificates of a model's segments. Every field suits JSON.

    `placement` lists the placements of its sublayers. `form` is that of the costates: "continuous",
    or "discrete" if the continuous costate does not exist, for the reason in `instead`. `missing`
    maps the segments without a certificate, and parts of the model that are in no segment, to the
    reason: the model's verdict is then at best open.
    `unsure` numbers those among them whose verdict does not hold at large weights. `no_threshold`
    says why no penalty of the weights is known for any segment, if that is so.
    """

    placement: str
    loss: float
    tokens: int
    segments: tuple[SegmentCheck, ...]
    form: str = "continuous"
    instead: str | None = None
    missing: dict[str, str] = field(default_factory=dict)
    no_threshold: str = ""
    unsure: tuple[int, ...] = ()

    skipped = OldReasons()

    @property
    def largest(self) -> SegmentCheck:
        """The segment with the largest costate."""
        return max(self.segments, key=lambda segment: segment.costate_norm)

    @property
    def has_ode(self) -> bool:
        """Whether every segment has an ODE. The verdict of a segment without one is that of its
        discrete step.
        """
        return all(segment.ode for segment in self.segments)

    @property
    def verdict(self) -> Posedness:
        """The weakest verdict of the segments, for the ODE: one unbounded velocity makes training
        degenerate. Where a segment is missing it is at best open, as nobody knows whether H is
        finite there.
        """
        return self._weakest([segment.verdict for segment in self.segments])

    @property
    def step_verdict(self) -> Posedness:
        """The same for the discrete model."""
        return self._weakest([segment.step_verdict for segment in self.segments])

    def _weakest(self, verdicts: list[Posedness]) -> Posedness:
        if self.unsure or self.missing:
            verdicts = [*verdicts, verdict_of(finite=None)]
        return max(verdicts, key=VERDICTS.index)

    @property
    def finite(self) -> bool:
        """Whether H is finite on every segment of the ODE, under the verdict's assumption."""
        return self.verdict not in ("open", "degenerate")

    @property
    def training_threshold(self) -> DecayThreshold | None:
        """The penalty that suffices on all segments whose H is infinite without one: the largest
        one found and the largest one proven. None if there is no such segment, or one has none.
        Nothing is proven with a segment missing. Segments whose Transformer needs none count only
        if no other one does: the penalty is then the ODE's.
        """
        infinite = [
            segment for segment in self.segments if segment.certificate.verdict == "degenerate"
        ]
        needing = [segment for segment in infinite if segment.needs_penalty] or infinite
        thresholds = [segment.threshold for segment in needing if segment.threshold is not None]
        if not thresholds or len(thresholds) < len(needing):
            return None
        threshold = largest(thresholds)
        if self.missing:
            return replace(threshold, upper=math.inf)
        return threshold

    @property
    def held(self) -> tuple[str, ...]:
        """What must also stay fixed or bounded if the verdict is that of a weight decay: biases, or
        an input norm's gains.
        """
        threshold = self.training_threshold
        if threshold is None or not any(segment.decayed for segment in self.segments):
            return ()
        held: tuple[str, ...] = ()
        if threshold.bias > 0:
            held += ("biases",)
        if threshold.gains:
            held += ("gains",)
        return held

    @property
    def failures(self) -> list[str]:
        """The findings that contradict the verdicts, each with its segment; empty if all agree."""
        return [failure for segment in self.segments for failure in segment.failures]

    @property
    def agrees(self) -> bool:
        """Whether the evidence on every segment supports its verdict."""
        return not self.failures

    @property
    def evidence(self) -> dict[str, float | None]:
        """The weakest evidence for the ODE's verdict, over the segments whose verdict no weight
        decay decides (see `weakest`).
        """
        return weakest(segment.certificate for segment in self.segments if not segment.decayed)

    @property
    def step_evidence(self) -> dict[str, float | None] | None:
        """The weakest evidence for the discrete step; None if no step has a set of its own."""
        steps = [segment.step for segment in self.segments if segment.step is not None]
        if steps:
            return weakest(steps)
        return None


def why_not_applicable(placement: Placement, regularization: Regularization) -> str | None:
    """Why the admissible set of a placement does not take this regularization; None if it does.
    Needs no model.
    """
    one = torch.ones(1, 2)
    try:
        admissible_at(RMSNorm(2), placement, one, one, regularization)
    except ConfigError as error:
        return str(error)
    return None


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ConfigError for a dtype without matrix decompositions."""
    if dtype not in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"dtype {name} has no matrix decompositions, which the check needs: take float32 or"
            " float64"
        )


@leaving_as_found
def check_model(
    model: Model,
    tokens: Tensor,
    targets: Any,
    regularization: Regularization | None = None,
    *,
    thorough: bool = False,
    progress: SegmentCallback | None = None,
) -> ModelCheck:
    """H(P) = sup of -<P, f> over the velocities of each segment's placement, with its certificate
    at the continuous costate P.

    P and X are taken at the segment's start, with the text's sequences side by side, because they
    share one set of weights. The last linear map acts on its features of X, with a column of ones
    if it has a bias.

    - If a norm acts on the state, the discrete step has a set of its own. The check certifies it at
      the discrete model's costates. For all other placements the step's velocities are the ODE's
    - Each finite H is compared with an ascent over velocities; each infinite one gets a witness.
      What weights of the last map attain, freely and within a bound, is searched on the segment
      with the largest costate; if `thorough`, on each segment, and with trained gains too
    - On the segment with the largest decay threshold the check also looks for the best attention
      rows, and climbs over the factors that decay
    - If the continuous costate does not exist, the check uses the discrete one
    - The check skips a segment that cannot be certified, and names it in `missing`
    - It calls `progress(k)` after each segment
    - Of an opened model whose loss is not known, targets that are classes give a cross-entropy. A
      warning says why others are not used

    Raises ConfigError for a regularization that a placement does not take (see
    `why_not_applicable`), the errors of `costate` in its discrete form, and the first segment's
    error if no segment can be certified.

    >>> check_model(model, tokens[:, :-1], tokens[:, 1:]).verdict
    """
    if regularization is None:
        regularization = Regularization()
    check_dtype(next(iter(model.depth.parameters()), torch.empty(0)).dtype)
    if tokens.dim() == 1 and not tokens.is_floating_point():
        tokens = tokens.unsqueeze(0)  # one text without a batch
        if isinstance(targets, Tensor):
            targets = targets.unsqueeze(0)
    model = _with_loss_of(model, tokens, targets)
    sublayers = model.depth.sublayers
    has_steps = any(each.state_norm is not None or each.output_norm is None for each in sublayers)
    # a verdict of the ODE under a penalty needs to know how precise its costate is
    precise = thorough or (regularization.weight_decay is not None and has_steps)
    found = _costates(model, tokens, targets, precise=precise, has_steps=has_steps)
    costates = found.costates
    of_steps = found.of_steps
    factors = factors_of_model(model, of_steps.states[:-1])
    checked = CheckedSegments(model.depth, costates, of_steps, regularization, factors, found.lost)
    checked.check_all(thorough=thorough, progress=progress)
    segments = checked.segments
    agreement = OwnLoss()
    if any(segment.certificate.verdict == "degenerate" for segment in segments):
        agreement = _agreement(model, tokens, targets, of_steps, factors)
    no_threshold = agreement.otherwise or agreement.untested
    if no_threshold:
        segments = [_without_thresholds(segment) for segment in segments]
    check = ModelCheck(
        placement=", ".join(sorted({sublayer.placement.name for sublayer in sublayers})),
        loss=costates.loss,
        tokens=of_steps.states[0].shape[:-1].numel(),
        segments=tuple(segments),
        form=costates.form,
        instead=found.instead,
        missing=checked.skipped | factors.outside,
        no_threshold=no_threshold,
        unsure=tuple(sorted(checked.unsure)),
    )
    of_solver: dict[int, float] = {}
    if costates.form == "continuous" and precise:
        of_solver = margins_of(check.segments, model, tokens, targets)
    climb = thorough or regularization.weight_decay is not None
    check = _with_best_rows(check, model.depth, costates, of_steps, climb=climb)
    contradiction = why_contradicted(check.segments)
    if contradiction:
        segments = [_without_thresholds(segment) for segment in check.segments]
        check = replace(check, segments=tuple(segments), no_threshold=contradiction)
    if not check.no_threshold:
        check = replace(check, no_threshold=_why_no_path(check, model.depth, of_steps))
    rounding: dict[int, float] = {}
    if any(segment.step_threshold is not None for segment in check.segments):
        rounding = errors_of(model, tokens, targets, of_steps)
    segments = [
        with_margins(
            segment,
            sublayers[segment.segment],
            costates.states[segment.segment],
            factors,
            of_costate=rounding.get(segment.segment, 0.0) + agreement.share,
            of_solver=of_solver.get(segment.segment, 0.0) + agreement.share,
        )
        for segment in check.segments
    ]
    return replace(check, segments=tuple(segments))


def _agreement(
    model: Model, tokens: Tensor, targets: Any, of_steps: Costate, factors: Factors
) -> OwnLoss:
    """Whether thresholds of segments are those of the model, and its loss that of the costate."""
    otherwise = why_no_threshold(model.depth, factors) or factors.outside.get(WAY, "")
    if otherwise:
        return OwnLoss(otherwise=otherwise)
    return own_loss(model, tokens, targets, of_steps)


def _with_loss_of(model: Model, tokens: Tensor, targets: Any) -> Model:
    """The model inside of an opened one, with the loss of these targets; any other model itself."""
    if not isinstance(model, OpenedModel):
        return model
    inside, unused = model.for_targets(tokens, targets)
    if unused:
        warnings.warn(unused, stacklevel=4)
    return inside


@dataclass(frozen=True)
class _BothCostates:
    """The costates of a check.

    - `costates`: of the ODE, or of the discrete model for the reason in `instead`
    - `of_steps`: of the discrete model; those of the ODE where its steps have no set of their own
    - `lost`: the segments whose costate rounding has made 0, each with the reason
    """

    costates: Costate
    of_steps: Costate
    instead: str | None
    lost: dict[int, str]


def _costates(
    model: Model, tokens: Tensor, targets: Any, *, precise: bool, has_steps: bool
) -> _BothCostates:
    """The costates, to the usual tolerances if `precise`. `has_steps`: whether steps of the
    discrete model have a set of their own, or need a penalty.
    """
    tolerances = {} if precise else {"rtol": RTOL, "atol": ATOL}
    of_steps: Costate | None = None
    lost: dict[int, str] = {}
    if has_steps:
        # before the ODE, whose solution may take long where numbers overflow
        of_steps = costate(model, tokens, targets)
        lost = lost_segments(model, tokens, targets, of_steps)
        if len(lost) == len(model.depth.sublayers):
            raise ConfigError(lost[0])
    costates, instead = continuous_or_discrete(model, tokens, targets, **tolerances)
    if of_steps is None or costates.form == "discrete":
        of_steps = costates
    return _BothCostates(costates, of_steps, instead, lost)


def _why_no_path(check: ModelCheck, depth: Depth, of_steps: Costate) -> str:
    """Why the first segment of an infinite H without a threshold has none; "" if all have one, or
    if its map shows its factors.
    """
    for segment in check.segments:
        if segment.certificate.verdict == "degenerate" and segment.threshold is None:
            k = segment.segment
            sublayer = depth.sublayers[k]
            if has_zero_gain(sublayer):
                return (
                    f"segment {k} ({segment.kind}): its residual gain is 0, so that no weights of"
                    " its map act"
                )
            try:
                path_of(sublayer.field, sublayer.given(sublayer.enter(of_steps.states[k])))
            except ConfigError as error:
                return f"segment {k} ({segment.kind}): {error}"
    return ""


def _without_thresholds(segment: SegmentCheck) -> SegmentCheck:
    return replace(segment, training_threshold=None, step_threshold=None)


@torch.no_grad()
def _with_best_rows(
    check: ModelCheck, depth: Depth, costates: Costate, of_steps: Costate, *, climb: bool
) -> ModelCheck:
    """The check with the best rows, and with `climb` ascents over the factors, on the segment with
    the largest proven threshold.
    """

    def size(segment: SegmentCheck) -> float:
        if segment.threshold is None:
            return 0.0
        return segment.threshold.upper

    top = max(check.segments, key=size)
    if top.threshold is None or size(top) == 0:
        return check
    sublayer = list(depth.sublayers)[top.segment]
    dt = depth.lengths[top.segment]
    if top.step_threshold is not None:
        x = sublayer.enter(of_steps.states[top.segment])
        after = of_steps.costates[top.segment + 1]
        P = sublayer.gain * sublayer.residual.pull(after).flatten(0, -2)
    else:
        start = costates.starts[top.segment]
        x, p = at_field(sublayer, start, continuous=costates.form == "continuous")
        P = sublayer.gain * costate_of_raw_output(sublayer, x, p)
    P, p_size = at_unit_size(P)
    given = sublayer.given(x)
    try:
        path = with_best_rows(path_of(sublayer.field, given), sublayer.field, given, P)
    except Exception:  # code of others raises what it likes at large weights
        return check
    lower, _ = path.threshold(P)
    threshold = replace(top.threshold, lower=lower)
    if climb:
        threshold = with_evidence(threshold, path, P)
    threshold = replace(
        threshold.times(product(dt, p_size)),
        upper=top.threshold.upper,
        bias=top.threshold.bias,
        uncancelled=top.threshold.uncancelled,
    )
    if top.step_threshold is not None:
        found = replace(top, step_threshold=threshold)
    else:
        found = replace(top, training_threshold=threshold)
    segments = list(check.segments)
    segments[segments.index(top)] = found
    return replace(check, segments=tuple(segments))
