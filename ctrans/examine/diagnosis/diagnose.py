"""Diagnosis of a model from one walk: findings in words, most severe first.

>>> for finding in diagnose(model, tokens[:, :-1], tokens[:, 1:]).findings:
...     print(finding.check, finding.place, finding.figure, finding.remediation)
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jaxtyping import Shaped
from torch import Tensor, nn

from ctrans.base.as_found import leaving_as_found
from ctrans.base.old_names import OldReasons
from ctrans.dynamics.fields import ExposesRows
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.examine.diagnosis.instruments import instrument_names, instruments
from ctrans.examine.diagnosis.loss_instruments import DecayOverThreshold
from ctrans.examine.diagnosis.reading import cut, place_of
from ctrans.examine.diagnosis.state_instruments import sensitivity_readings
from ctrans.examine.diagnosis.weight_readings import weight_readings
from ctrans.examine.search.limits import QUANTITY
from ctrans.interop.attention_in_model import mixing_without_rows
from ctrans.measure.backward.sensitivity import NOT_FINITE, Sensitivities
from ctrans.measure.findings import SEVERITIES, Checks, Finding, Reading, Readings, in_words
from ctrans.measure.walk import (
    Attempt,
    Lane,
    Model,
    SegmentCallback,
    loss_refusal,
    walk_lanes,
)
from solvers import ConfigError, shown

JACOBIAN_TOKENS = 64
"""Number of tokens of a Jacobian."""
JACOBIAN_SEQUENCES = 4
"""Number of sequences of a Jacobian, of which the worst counts."""
WIDTH = 80
"""Columns of a diagnosis as text."""
TOLERANCE = 0.02
"""Relative error of a Jacobian's norm."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The findings of a model on a text. All fields can be written as JSON.

    - `findings`: figures outside their limits, most severe first; empty for a healthy model
    - `readings`: all figures by quantity
    - `missing`: the reason why something was not measured, by quantity or instrument
    - `texts`: number of walks
    """

    findings: list[Finding]
    readings: Readings
    missing: dict[str, str]
    texts: int = 1

    unknown = OldReasons()
    checks: ClassVar[Checks] = CHECKS

    @property
    def healthy(self) -> bool:
        return not self.findings

    @property
    def examined(self) -> list[str]:
        """The checks whose quantity has a reading that is a number."""
        return [
            name
            for name, check in self.checks.items()
            if any(
                not math.isnan(reading.value) for reading in self.readings.get(check.quantity, ())
            )
        ]

    @property
    def unexamined(self) -> list[str]:
        """The checks whose quantity has no such reading: the model has no such part, or it was not
        measured (`missing`).
        """
        return [name for name in self.checks if name not in self.examined]

    def stopped_by(self, check: str) -> str:
        """The instrument in `missing` that would have measured the quantity of a check, or ""."""
        if check in self.examined:
            return ""
        names = instrument_names(self.checks[check].quantity)
        return next((name for name in names if name in self.missing), "")

    @property
    def near(self) -> dict[str, Reading]:
        """By check, the reading closest to its limit from inside, if within the factor `Check.near`
        of it.

        Without checks that are findings or that findings suppress.
        """
        return self.checks.near(self.readings, [finding.check for finding in self.findings])

    @property
    def summary(self) -> str:
        """The number of findings by severity, and the number of checks that were measured."""
        looked = f"{len(self.examined)} of {len(self.checks)} kinds of finding were examined"
        if self.unexamined:
            looked += ", the others need parts or options that are not here"
        if self.healthy:
            if QUANTITY in self.missing:
                looked += f"; the search over edits: {self.missing[QUANTITY]}"
            return f"nothing found in single parts; {looked}"
        severities = [finding.severity for finding in self.findings]
        counts = ", ".join(
            f"{severities.count(severity)} {severity}"
            for severity in SEVERITIES
            if severity in severities
        )
        if len(severities) == 1:
            findings = "1 finding"
        else:
            findings = f"{len(severities)} findings"
        return f"{findings} ({counts}); {looked}"

    def __str__(self) -> str:
        """The diagnosis as text of `WIDTH` columns."""
        lines = textwrap.wrap(f"diagnosis: {self.summary}", WIDTH)
        for i, finding in enumerate(self.findings, 1):
            lines += ["", f"{i}. {finding.check} ({finding.severity})"]
            for word, text in in_words(dataclasses.asdict(finding)).items():
                lines += textwrap.wrap(
                    text, WIDTH, initial_indent=f"   {word:<7}", subsequent_indent=" " * 10
                )
        close = [
            f"close to a limit: {name}: {r.place}: {r.figure} (a finding {self.checks[name].limit})"
            for name, r in self.near.items()
        ]
        stopped: dict[str, list[str]] = {}
        for check in self.unexamined:
            stopped.setdefault(self.stopped_by(check), []).append(check)
        missing = []
        for name, why in self.missing.items():
            of_checks = ""
            if name in stopped:
                of_checks = f" (for {', '.join(stopped[name])})"
            missing.append(f"not measured: {name}{of_checks}: {why}")
        if stopped.get(""):
            needs = [
                f"{name} (needs {self.checks[name].requires or 'a walk'})" for name in stopped[""]
            ]
            missing.append(f"not examined, so neither found nor ruled out: {'; '.join(needs)}")
        for remarks in (close, missing):
            if remarks:
                lines.append("")
            for remark in remarks:
                lines += textwrap.wrap(remark, WIDTH, subsequent_indent="  ")
        return "\n".join(lines)


def readings_in(model: Mapping[str, Any]) -> Readings:
    """The readings of a diagnosis from its JSON object. Raises ConfigError for another object."""
    try:
        return {
            quantity: [Reading(**reading) for reading in readings]
            for quantity, readings in model["readings"].items()
        }
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"model = {shown(model)} has no readings: give the object of a model in a diagnosis's"
            " JSON"
        ) from None


@dataclasses.dataclass(frozen=True)
class SearchRequest:
    """A search for edits of the model that lower its loss, of at most so many seconds.
    `progress(share)` is called with the share that is done.
    """

    seconds: float = 120.0
    progress: Callable[[float], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, (int, float)) or not 0 < self.seconds < math.inf:
            raise ConfigError(
                f"search = {shown(self.seconds)}: give the seconds that it may take, a number above"
                " 0"
            )


class Examination:
    """Instruments of a diagnosis, for the whole text (`whole`) and for the tokens of Jacobians
    (`part`), in a walk of their own or together with others. Call `conclude` after the walk.

    `sensitivities` is an instrument of the sublayers' sensitivities, if the walk has one already.
    """

    def __init__(
        self,
        model: Model,
        *,
        weight_decay: float | None = None,
        sensitivities: Sensitivities | None = None,
    ):
        if weight_decay is not None and not 0 <= weight_decay < math.inf:
            raise ConfigError(
                f"weight_decay = {weight_decay!r}: give the training's weight decay, a finite"
                " number of at least 0"
            )
        self.model = model
        self.missing: dict[str, str] = {}
        self.searched: Readings = {}
        whole = instruments()
        if weight_decay is not None:
            whole["decay over dt lam*"] = DecayOverThreshold(weight_decay)
        self.whole = {
            name: Attempt(instrument, self.missing, name) for name, instrument in whole.items()
        }
        self.sensitivities = sensitivities or Sensitivities(tolerance=TOLERANCE, starts=0)
        self.part: list[Attempt] = []
        if not sensitivities:
            self.part.append(Attempt(self.sensitivities, self.missing, "sensitivities"))

    def search(self, tokens: Tensor, targets: Any, search: SearchRequest) -> None:
        """Searches for edits that lower the loss, or notes why it cannot."""
        if targets is None:
            self.missing[QUANTITY] = "no targets were given, so there is no loss to lower"
            return
        if self.model.depth.streamed:
            self.missing[QUANTITY] = "weights that are read on demand cannot be edited"
            return
        # here: few diagnoses search
        from ctrans.examine.search.edit_search import search_edits

        try:
            result = search_edits(
                self.model, tokens, targets, seconds=search.seconds, progress=search.progress
            )
        except ConfigError as error:
            self.missing[QUANTITY] = str(error)
            return
        self.searched = {QUANTITY: result.readings}
        if result.untried and not result.found:
            self.missing[QUANTITY] = (
                f"the time ended before {result.untried} edits; {result.tried} were tried"
            )

    def conclude(self, why_no_sensitivities: str = "left out") -> Diagnosis:
        """The diagnosis after the walk. `why_no_sensitivities` is the reason if others measured
        them and failed.
        """
        depth = self.model.depth
        of_weights: Readings = {}
        if isinstance(self.model, nn.Module) and not depth.streamed:
            of_weights = weight_readings(self.model, depth)
        sources: list[Readings] = [self.searched]
        # non-finite weights come before their effect on states
        not_finite = of_weights.pop("entries that are not finite", None)
        if not_finite is not None:
            sources.append({"entries that are not finite": not_finite})
        sources += [instrument.figures() or {} for instrument in self.whole.values()]
        # in the order of the instruments, not in that in which they failed
        missing = {
            name: self.missing[name] for name in (*self.whole, QUANTITY) if name in self.missing
        }
        sensitivities = self.sensitivities.sublayers
        sources += [of_weights, sensitivity_readings(depth, sensitivities)]
        readings: Readings = {}
        for source in sources:
            for quantity, several in source.items():
                readings.setdefault(quantity, []).extend(several)
        refused = [
            (k, sensitivity.note)
            for k, sensitivity in enumerate(sensitivities)
            if sensitivity.value is None and sensitivity.note != NOT_FINITE
        ]
        if len(sensitivities) < len(depth.sublayers):
            missing["sensitivities"] = self.missing.get("sensitivities", why_no_sensitivities)
        elif refused:
            k, note = refused[0]
            count = len(sensitivities)
            if len(refused) == count:
                missing["sensitivities"] = note
            else:
                missing["sensitivities"] = (
                    f"of {len(refused)} of {count} sublayers, the first {place_of(depth, k)}:"
                    f" {note}; those of the others are known"
                )
        unread = getattr(getattr(self.model, "config", None), "unread", ())
        if any(sublayer.kind == "part" for sublayer in depth.sublayers) and unread:
            missing["model"] = "; ".join(unread)
        if not readings.get("least entropy of a head"):
            missing.setdefault("heads", self._why_no_heads())
        return Diagnosis(CHECKS.judge(readings), readings, missing)

    def _why_no_heads(self) -> str:
        branches = [sublayer.attention for sublayer in self.model.depth.sublayers]
        maps = [branch.field for branch in branches if branch is not None]
        if any(isinstance(field, ExposesRows) for field in maps):
            return "no head reads a finite state and more than one token"
        mixing = [mixing_without_rows(field) for field in maps]
        if mixing and all(mixing):
            what = ", ".join(dict.fromkeys(mixing))
            return f"its tokens are mixed by {what}: no rows of a softmax are seen"
        return "this model's attention does not expose the rows of its heads"


def lane_of_attempts(
    model: Model, tokens: Tensor, targets: Any, attempts: Sequence[Attempt]
) -> Lane:
    """A lane with these instruments. Without a loss those that look back are left out."""
    look_back = [attempt for attempt in attempts if attempt.looks_back]
    if not look_back:
        return Lane(tokens, None, attempts)
    if targets is None:
        refusal: str | None = "no targets were given, so there is no loss"
    else:
        refusal = loss_refusal(model, tokens, targets)
    if refusal is None:
        return Lane(tokens, targets, attempts)
    for attempt in look_back:
        attempt.leave_out(refusal)
    return Lane(tokens, None, attempts)


@leaving_as_found
def diagnose(
    model: Model,
    tokens: Shaped[Tensor, "*batch tokens"],
    targets: Any = None,
    *,
    weight_decay: float | None = None,
    search: SearchRequest | None = None,
    progress: SegmentCallback | None = None,
) -> Diagnosis:
    """Finds faults of a model on a text, from one forward walk and, with targets, one backward
    walk.

    `weight_decay` is that of the training, compared with dt lam*. Jacobians use the first 64 tokens
    of up to 4 sequences, or of one if weights are made on demand. Without targets, or if the model
    has no loss for them, checks that need a loss are in `missing`. `search` also looks for edits
    that lower the loss.
    """
    examination = Examination(model, weight_decay=weight_decay)
    if model.depth.streamed:
        several = 1
    else:
        several = JACOBIAN_SEQUENCES
    lanes = [
        lane_of_attempts(model, tokens, targets, list(examination.whole.values())),
        Lane(cut(tokens, several, JACOBIAN_TOKENS), None, examination.part),
    ]
    walk_lanes(model, lanes, progress=progress)
    if search is not None:
        examination.search(tokens, targets, search)
    return examination.conclude()


def merged(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Merges diagnoses of several texts or seeds. A finding of any walk counts, with the number of
    walks that saw it and each walk's value.

    `readings` are those of the first walk.
    """
    if not diagnoses:
        raise ConfigError("diagnoses = []: give at least one")
    first = diagnoses[0]
    count = len(diagnoses)
    findings = []
    for name, check in CHECKS.items():
        seen = [
            finding
            for diagnosis in diagnoses
            for finding in diagnosis.findings
            if finding.check == name
        ]
        if not seen:
            continue
        values = []
        for diagnosis in diagnoses:
            readings = diagnosis.readings.get(check.quantity, [])
            if readings:
                worst_reading = max(readings, key=lambda reading: check.excess(reading.value))
                values.append(worst_reading.value)
        worst = max(seen, key=lambda finding: check.excess(finding.value))
        findings.append(dataclasses.replace(worst, seen=len(seen), texts=count, values=values))
    missing = {name: why for diagnosis in diagnoses for name, why in diagnosis.missing.items()}
    return Diagnosis(CHECKS.ordered(findings), first.readings, missing, count)
