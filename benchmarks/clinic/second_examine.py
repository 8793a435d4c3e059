"""Examines a patient or a healthy control of the second trial.

A model is trained for `TRAINED` steps, of which the monitor sees the first ones, and is then
diagnosed with a search over edits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.clinic import examine as first_trial
from benchmarks.clinic.case import Case
from benchmarks.clinic.course import STEPS, Course, course
from benchmarks.clinic.cures import advice, placebo
from benchmarks.clinic.examine import (
    KEPT,
    MORE,
    checks_hash,
    number,
    opened,
    short,
    trained_on,
    watched,
)
from benchmarks.clinic.faults import Fault
from benchmarks.clinic.seal import SECOND, Patient
from benchmarks.clinic.treatments import TREATMENTS
from ctrans.examine.diagnosis.diagnose import SearchRequest, diagnose
from ctrans.examine.search import edit_search
from ctrans.examine.search.runs import Runs
from ctrans.measure.findings import Finding
from solvers import ConfigError

TRAINED, EARLIER = 720, 600
"""Steps of a model's training, and those of the copy that its advice may go back to."""
SEQUENCES, SECONDS = 64, 60.0
"""Sequences that `diagnose` reads, and the seconds of its search by the clock, on a machine that
others load too: 20 or so of the processor.
"""
NO_PATIENT, FAILED = "does not fit", "failed"
"""Endings of a row."""
BY_SEARCH = "an edit lowers the loss"


@dataclasses.dataclass(frozen=True)
class Examined:
    """What `diagnose` with a search says, and the held-out loss with the edits that it found."""

    findings: list[Finding]
    edits: list[str]
    loss_with_edits: float | None
    untried: int = 0
    refused: str = ""


@dataclasses.dataclass
class Searched:
    """The runs of a search, with the edits that it kept, and its result."""

    runs: list[Runs] = dataclasses.field(default_factory=list)
    results: list[edit_search.EditSearch] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def observed() -> Iterator[Searched]:
    """Notes what each search of this context does."""
    seen = Searched()

    class Noted(Runs):
        def __init__(self, model: Any, tokens: Tensor, targets: Any):
            super().__init__(model, tokens, targets)
            seen.runs.append(self)

    search = edit_search.search_edits

    def noted(*given: Any, **options: Any) -> edit_search.EditSearch:
        seen.results.append(search(*given, **options))
        return seen.results[-1]

    edit_search.Runs, edit_search.search_edits = Noted, noted  # type: ignore[misc]
    try:
        yield seen
    finally:
        edit_search.Runs, edit_search.search_edits = Runs, search  # type: ignore[misc]


def diagnosed(made: Course, *, as_told: bool) -> Examined:
    """`as_told` opens a model as the message of a refusal says, with the inputs as its example."""
    made.body.model.eval()
    read, targets = made.held_out()
    body = made.body
    if as_told:
        body = dataclasses.replace(body, example=read[:SEQUENCES])
    torch.manual_seed(0)
    with observed() as searched:
        try:
            found = diagnose(
                opened(body),
                read[:SEQUENCES],
                targets[:SEQUENCES],
                search=SearchRequest(SECONDS),
            ).findings
        except ConfigError as error:
            return Examined([], [], None, refused=str(error)[:300])
    untried = sum(result.untried for result in searched.results)
    edits = [each.words for run in searched.runs for each in run.kept]
    if not edits:
        return Examined(found, [], None, untried)
    run = searched.runs[-1]
    run.tokens, run.targets = read, targets
    losses = run.losses(None, slice(None))
    return Examined(found, edits, None if losses is None else float(losses.mean()), untried)


@functools.lru_cache(4)
def control(architecture: str, task: str, seed: int, *, as_told: bool = False) -> dict[str, Any]:
    """A healthy training and the healthy model that it becomes. It is kept."""
    way = "-as-told" if as_told else ""
    path = KEPT / f"second-{architecture}-{task}-{seed}-{checks_hash()}{way}.pt"
    if path.exists():
        kept: dict[str, Any] = torch.load(path)
        return kept
    made = course(architecture, task, seed)
    alarms, _ = watched(made)
    found: dict[str, Any] = {
        "alarms": short(alarms),
        "losses": list(made.losses),
        "loss": made.evaluate(),
    }
    found["earlier"] = state_of(made.run(EARLIER))
    found["weights"] = state_of(made.run(TRAINED))
    examined = diagnosed(made, as_told=as_told)
    found |= {
        "model loss": made.evaluate(),
        "findings": short(examined.findings),
        "edits": examined.edits,
        "untried": examined.untried,
        "refused": examined.refused,
    }
    found["trained on"] = trained_on(made).evaluate()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, path)
    return found


def state_of(made: Course) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in made.body.model.state_dict().items()}


def trained(patient: Patient, which: str = "weights") -> Course:
    """The control's course with its weights at the end, or at the earlier step."""
    made = course(patient.architecture, patient.task, patient.seed)
    own = control(patient.architecture, patient.task, patient.seed)
    made.body.model.load_state_dict(own[which])
    made.step = TRAINED
    made.make_optimiser()
    return made


def examine(patient: Patient, *, as_told: bool = False) -> dict[str, Any]:
    """A row of results."""
    torch.set_num_threads(1)
    started = time.process_time()
    row: dict[str, Any] = patient._asdict()
    if not patient.fault:
        row |= healthy(patient, as_told=as_told)
    else:
        fault = SECOND.fault(patient.kind, patient.fault)
        if fault.fits(course(patient.architecture, patient.task, patient.seed)):
            row |= sick(patient, fault, as_told=as_told)
        else:
            row |= {"ending": NO_PATIENT}
    return row | {"seconds": round(time.process_time() - started, 2)}


def healthy(patient: Patient, *, as_told: bool) -> dict[str, Any]:
    own = control(patient.architecture, patient.task, patient.seed, as_told=as_told)
    said = {name: own.get(name) for name in ("alarms", "findings", "edits", "untried", "refused")}
    losses = {"loss": number(own["loss"]), "model loss": number(own["model loss"])}
    return {**said, **losses, "steps": STEPS}


def sick(patient: Patient, fault: Fault, *, as_told: bool) -> dict[str, Any]:
    own = control(patient.architecture, patient.task, patient.seed, as_told=as_told)
    try:
        if patient.kind == "model":
            return model(patient, fault, own, as_told=as_told)
        return first_trial.training(patient, fault, own, tried=True, cured=False)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        return {"ending": FAILED, "refused": repr(error)[:300], "found": [], "arms": {}}


def model(patient: Patient, fault: Fault, own: dict[str, Any], *, as_told: bool) -> dict[str, Any]:
    made = trained(patient)
    fault.put(made)
    loss = made.evaluate()
    examined = diagnosed(made, as_told=as_told)
    known = {check for check, *_ in own["findings"]}
    counted = [each for each in examined.findings if each.check not in known]
    earlier = trained(patient, "earlier")

    def treated(name: str, finding: Finding | None) -> float:
        arm = made.copy()
        TREATMENTS[name](Case(arm, finding, earlier))
        return trained_on(arm).evaluate()

    fresh = course(patient.architecture, patient.task, patient.seed + 50)
    if fault.stands:
        fault.put(fresh)
    first = counted[0] if counted else None
    advised = "nothing" if first is None else advice(first)
    other = placebo(advised, "/".join(map(str, patient)), monitor=False)
    arms: dict[str, float | None] = {
        "healthy": own["trained on"],
        "none": treated("nothing", None),
        "advice": None if first is None else treated(advised, first),
        "placebo": treated(other, first),
        "restart": fresh.run(MORE).evaluate(),
    }
    return {
        "ending": "refused" if examined.refused else "examined",
        "refused": examined.refused,
        "found": short(counted),
        "loss": number(loss),
        "healthy": number(own["model loss"]),
        "edits": examined.edits,
        "untried": examined.untried,
        "loss with edits": shown(examined.loss_with_edits),
        "arms": {name: shown(value) for name, value in arms.items()},
        "treatments": {"advice": advised if counted else None, "placebo": other},
    }


def shown(value: float | None) -> float | None:
    return None if value is None else number(value)
