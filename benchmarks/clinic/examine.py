"""Examines one patient or one healthy control: what is found, what its advice does, and what other
acts do.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.clinic.bodies import Body
from benchmarks.clinic.case import Case
from benchmarks.clinic.course import EVERY, STEPS, Course, course
from benchmarks.clinic.cures import advice, placebo
from benchmarks.clinic.faults import Fault
from benchmarks.clinic.judging import shows, six_sigma
from benchmarks.clinic.seal import FIRST, Patient
from benchmarks.clinic.treatments import TREATMENTS
from ctrans import GPT, open_model
from ctrans.examine.diagnosis.diagnose import diagnose
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.measure.findings import Finding, as_object
from ctrans.training.monitor import ALARMS, Monitor
from solvers import ConfigError

KEPT = Path("out/clinic")
"""The trained controls, from which patients start. They are made again where they are missing, or
were judged by other checks.
"""
MORE, LATE_RATE, EARLIER, SNAPSHOTS, SEQUENCES = 40, 1e-3, 200, 20, 8
"""Steps by which a model is trained on, and their rate; the step of the earlier copy; steps between
copies of a training; sequences that `diagnose` reads.
"""


def findings_of(made: Course) -> list[Finding]:
    """What `diagnose` finds. Raises ConfigError for a model that it refuses."""
    body = made.body
    body.model.eval()
    read, targets = made.held_out()
    return diagnose(opened(body), read[:SEQUENCES], targets[:SEQUENCES]).findings


def opened(body: Body) -> Any:
    """The model as ctrans reads it. Raises ConfigError for one that it refuses."""
    if isinstance(body.model, GPT):
        return body.model
    return open_model(body.model, example=body.example, loss=body.loss)


def monitor_of(made: Course) -> Monitor:
    given: dict[str, Any] = (
        {} if made.body.example is None else {"example": made.body.example, "loss": made.body.loss}
    )
    return Monitor(made.body.model, every=EVERY, clip=made.clip, **given)


def short(found: list[Finding]) -> list[list[Any]]:
    return [[each.check, each.severity, each.place, each.step] for each in found[:8]]


def number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def watched(made: Course) -> tuple[list[Finding], dict[int, Course]]:
    """Trains to the end or to a loss that is not finite; the alarms, and the copies of each
    `SNAPSHOTS` steps.
    """
    monitor, alarms, copies = monitor_of(made), list[Finding](), {}
    while made.step < STEPS and (
        made.step % EVERY or not made.losses or math.isfinite(made.losses[-1])
    ):
        if made.step % SNAPSHOTS == 0:
            copies[made.step] = made.copy()
        told = made.advance(monitor)
        alarms += told
        if told:
            copies[made.step] = made.copy()
    monitor.close()
    return alarms, copies


@functools.cache
def checks_hash() -> str:
    """Changes with any check."""
    alarms = ((name, as_object(each)) for name, each in ALARMS.items())
    return hashlib.sha256(repr([*CHECKS.items(), *alarms]).encode()).hexdigest()[:8]


@functools.lru_cache(4)
def control(architecture: str, task: str, seed: int) -> dict[str, Any]:
    """A healthy training: its weights at two steps, losses, alarms, findings, and the loss after
    `MORE` steps. It is kept.
    """
    path = KEPT / f"{architecture}-{task}-{seed}-{checks_hash()}.pt"
    if path.exists():
        kept: dict[str, Any] = torch.load(path)
        return kept
    made = course(architecture, task, seed)
    alarms, copies = watched(made)
    found = {
        "weights": {name: each.clone() for name, each in made.body.model.state_dict().items()},
        "earlier": copies[EARLIER].body.model.state_dict(),
        "losses": list(made.losses),
        "alarms": short(alarms),
        "findings": short(findings_of(made)),
        "loss": made.evaluate(),
    }
    found["trained on"] = trained_on(made).evaluate()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, path)
    return found


def trained_on(made: Course, steps: int = MORE) -> Course:
    """`steps` more steps at `LATE_RATE`, with fresh moments."""
    made.rate = min(made.rate, LATE_RATE)
    made.warm_up = made.step + 10
    made.make_optimiser()
    return made.run(made.step + steps)


def trained(patient: Patient, which: str = "weights") -> Course:
    """The control's course with its weights at the end, or at an earlier step."""
    made = course(patient.architecture, patient.task, patient.seed)
    made.body.model.load_state_dict(
        control(patient.architecture, patient.task, patient.seed)[which]
    )
    made.step = STEPS
    made.make_optimiser()
    return made


def examine(patient: Patient, *, arms: bool = True) -> dict[str, Any]:
    """A row of results; without `arms`, what is found alone."""
    torch.set_num_threads(1)
    started = time.process_time()
    own = control(patient.architecture, patient.task, patient.seed)
    row: dict[str, Any] = patient._asdict()
    if not patient.fault:
        row |= {
            "alarms": own["alarms"],
            "findings": own["findings"],
            "loss": number(own["loss"]),
            "steps": STEPS,
        }
    else:
        look = model if patient.kind == "model" else training
        fault = FIRST.fault(patient.kind, patient.fault)
        fits = fault.fits(course(patient.architecture, patient.task, patient.seed))
        row |= look(patient, fault, own, tried=arms) if fits else {"ending": "does not fit"}
    return row | {"seconds": round(time.process_time() - started, 2)}


def model(patient: Patient, fault: Fault, own: dict[str, Any], *, tried: bool) -> dict[str, Any]:
    made, refused = trained(patient), ""
    earlier = trained(patient, "earlier")
    fault.put(made)
    loss = made.evaluate()
    torch.manual_seed(0)
    try:
        found = findings_of(made)
    except ConfigError as error:
        found, refused = [], str(error)[:200]
    known = {check for check, *_ in own["findings"]}
    counted = [each for each in found if each.check not in known]
    seen = {
        "ending": "refused" if refused else "examined",
        "refused": refused,
        "found": short(counted),
        "loss": number(loss),
        "healthy": number(own["loss"]),
    }
    if not tried:
        return seen | {"arms": {}}

    def treated(name: str, finding: Finding | None) -> float:
        arm = made.copy()
        TREATMENTS[name](Case(arm, finding, earlier))
        return trained_on(arm).evaluate()

    fresh = course(patient.architecture, patient.task, patient.seed + 50)
    if fault.stands:
        fault.put(fresh)
    advised = advice(counted[0]) if counted else "nothing"
    other = placebo(advised, "/".join(map(str, patient)), monitor=False)
    arms: dict[str, float | None] = {
        "healthy": own["trained on"],
        "none": treated("nothing", None),
        "advice": treated(advised, counted[0]) if counted else None,
        "placebo": treated(other, counted[0] if counted else None),
        "restart": fresh.run(MORE).evaluate(),
    }
    arms["cure"] = (
        arms["advice"]
        if fault.cure == advised and counted
        else treated(fault.cure, located(fault))
        if fault.cure
        else None
    )
    return seen | {
        "arms": {name: None if value is None else number(value) for name, value in arms.items()},
        "treatments": {
            "advice": advised if counted else None,
            "placebo": other,
            "cure": fault.cure or None,
        },
    }


def located(fault: Fault) -> Finding:
    """A finding at the place of the fault, for its own cure."""
    attention = "attention" in fault.category or "head" in fault.place
    place = f"{fault.place}, {'attention' if attention else 'FFN'}"
    return Finding("", "", "note", place, 0.0, "", "", "", "", "")


def training(
    patient: Patient,
    fault: Fault,
    own: dict[str, Any],
    *,
    tried: bool,
    cured: bool = True,
) -> dict[str, Any]:
    """`cured`: whether what undoes the fault is tried too."""
    made = course(patient.architecture, patient.task, patient.seed)
    fault.put(made)
    torch.manual_seed(0)
    alarms, copies = watched(made)
    known = {check for check, *_ in own["alarms"]}
    counted = [
        each for each in alarms if (each.step or 0) > fault.start and each.check not in known
    ]
    early = [each for each in alarms if (each.step or 0) <= fault.start and each.check not in known]
    seen = {
        "ending": "examined",
        "found": short(counted),
        "early": short(early),
        "steps": made.step,
        "shows": shows(made.losses, own["losses"], fault.start),
        "sigma loss": six_sigma(made.losses, fault.start),
        "sigma norm": six_sigma(made.norms, fault.start),
    }
    if not tried:
        return seen | {"arms": {}}
    when = (
        counted[0].step
        if counted
        else next((step for step in copies if step > fault.start + 60), max(copies))
    )
    assert when is not None
    began = min(when, counted[0].since or when) if counted else when
    before = max((step for step in copies if step <= max(0, began - 10)), default=0)

    def treated(name: str, finding: Finding | None) -> float:
        arm = copies[when].copy()
        TREATMENTS[name](Case(arm, finding, copies[before].copy()))
        arm.losses = [each for each in arm.losses if math.isfinite(each)]
        return arm.run(STEPS).evaluate()

    fresh = course(patient.architecture, patient.task, patient.seed + 50)
    fault.put(fresh)
    advised = advice(counted[0]) if counted else "nothing"
    other = placebo(advised, "/".join(map(str, patient)), monitor=True)
    arms: dict[str, float | None] = {
        "healthy": own["loss"],
        "none": made.evaluate(),
        "advice": treated(advised, counted[0]) if counted else None,
        "placebo": treated(other, counted[0] if counted else None),
        "restart": fresh.run(STEPS).evaluate(),
    }
    if cured:
        arms["cure"] = (
            arms["advice"]
            if fault.cure == advised and counted
            else treated(fault.cure, located(fault))
            if fault.cure
            else None
        )
    return seen | {
        "arms": {name: None if value is None else number(value) for name, value in arms.items()},
        "treatments": {
            "advice": advised if counted else None,
            "placebo": other,
            "cure": fault.cure or None,
        },
    }
