"""Asks other tools about the patients of the second trial: `python -m benchmarks.clinic.peers NAME`.

- weightwatcher: the warnings of `analyze`, by layer, on the weights of each patient and its control
- torchlens: `tl.debug.audit_trace` of a pass forward and back, `audit_params`, `check_determinism`
- torch-preflight: `check` of each training fault as a script (`peer_scripts.py`)
- traincheck: invariants of the healthy script, checked on each training fault as a script

Found is a report on the patient that its control does not have. Needs weightwatcher 0.7.7, torchlens
2.36.1, traincheck 0.2.0 and torch-preflight 0.5.0 beside this project in one environment; ctrans does
not need them. Rows go to benchmarks/results/clinic/second-peers.jsonl, which the report of the trial
reads.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.clinic.__main__ import PEERS, RESULTS, key, rows
from benchmarks.clinic.course import STEPS, Course, course, cross_entropy
from benchmarks.clinic.peer_scripts import CHANGES, script
from benchmarks.clinic.seal import SECOND, Patient
from benchmarks.clinic.second_examine import TRAINED
from benchmarks.clinic.second_judging import is_patient

SEALED = RESULTS / "second-sealed.jsonl"
LEAST_EIGENVALUES = 10
"""Of a layer that WeightWatcher reads. Its usual 50 leaves out every layer of width 32."""
SEQUENCES = 4
"""That torchlens traces."""
Says = Callable[[Course], set[str]]


def weightwatcher(made: Course) -> set[str]:
    import weightwatcher as ww

    details = ww.WeightWatcher(model=made.body.model).analyze(min_evals=LEAST_EIGENVALUES)
    names = details["longname"] if "longname" in details else details["name"]
    pairs = zip(names, details["warning"], strict=True)
    return {f"{name}: {warning}" for name, warning in pairs if warning}


def torchlens(made: Course) -> set[str]:
    import torchlens as tl

    model = made.body.model.eval()
    inputs, targets = (each[:SEQUENCES] for each in made.held_out())
    said = {str(each)[:200] for each in tl.debug.audit_params(model).findings}
    verdict = tl.debug.check_determinism(model, inputs).verdict
    if verdict != "repeatable_under_test":
        said.add(verdict)
    trace = tl.trace(model, inputs, capture=tl.options.CaptureOptions(save_grads=True))
    logits = trace[trace.output_layers[0]].out
    trace.log_backward(cross_entropy(logits, targets))
    try:
        said |= {f"{each.check}: {each.modules}" for each in tl.debug.audit_trace(trace).findings}
    except tl.errors.InvalidArgumentError:
        # the audit of 2.36.1 ends so where a layer with a finding ran several times
        said |= {f"find_nan: {tl.debug.find_nan(model, inputs).label}"}
    return said


MODEL_PEERS: dict[str, Says] = {"weightwatcher": weightwatcher, "torchlens": torchlens}


@functools.lru_cache(8)
def healthy(kind: str, architecture: str, task: str, seed: int) -> Course:
    """The control: at the end of a training, or of that of a model."""
    return course(architecture, task, seed).run(TRAINED if kind == "model" else STEPS)


def of_patient(patient: Patient) -> Course:
    """The patient's weights: a model as it was examined, a training at its end."""
    fault = SECOND.fault(patient.kind, patient.fault)
    if patient.kind == "model":
        made = healthy(patient.kind, *patient[2:]).copy()
        fault.put(made)
        return made
    made = course(patient.architecture, patient.task, patient.seed)
    fault.put(made)
    return made.run(STEPS)


@functools.cache
def said_of_control(peer: str, kind: str, architecture: str, task: str, seed: int) -> set[str]:
    return MODEL_PEERS[peer](healthy(kind, architecture, task, seed).copy())


def asked(peer: str, patient: Patient) -> dict[str, Any]:
    torch.manual_seed(0)
    row: dict[str, Any] = {"peer": peer, **patient._asdict(), "found": [], "error": ""}
    try:
        control = said_of_control(peer, patient.kind, *patient[2:])
        row["found"] = sorted(MODEL_PEERS[peer](of_patient(patient)) - control)[:8]
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        row["error"] = repr(error)[:300]
    return row


def run(*words: str | Path, within: Path) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).parent / str(words[0])), *map(str, words[1:])],
        cwd=within,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def preflight(folder: Path) -> dict[str, set[str]]:
    """The rules that are broken, by fault."""
    broken: dict[str, set[str]] = {}
    for fault in ("", *CHANGES):
        (folder / "train.py").write_text(script(fault))
        said = run("torch-preflight", "check", "train.py", within=folder)
        broken[fault] = set(re.findall(r"\bTG\d{3}\b", said))
    return {fault: rules - broken[""] for fault, rules in broken.items() if fault}


def violated(folder: Path, fault: str) -> set[str]:
    """The lines of the invariants that TrainCheck says a script violates."""
    (folder / "train.py").write_text(script(fault))
    where = folder / (re.sub(r"\W+", "_", fault) or "healthy")
    model = ("--models-to-track", "model", "--output-dir", where)
    run(
        "traincheck-collect",
        "--pyscript",
        "train.py",
        *model,
        "--invariants",
        "invariants.json",
        within=folder,
    )
    run(
        "traincheck-check",
        "-f",
        where,
        "-i",
        "invariants.json",
        "-o",
        where / "checked",
        within=folder,
    )
    files = list(where.rglob("failed.log"))
    if not files:
        raise RuntimeError(f"{fault}: TrainCheck wrote no result")
    return set(invariants(files[0].read_text()))


def invariants(text: str) -> Iterator[str]:
    """The invariants of a log, which has one JSON object after another."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text.rstrip()):
        failed, place = decoder.raw_decode(text, place)
        place += len(text[place:]) - len(text[place:].lstrip())
        invariant = failed["invariant"]
        number = hashlib.sha256(json.dumps(invariant, sort_keys=True).encode()).hexdigest()[:6]
        yield f"{invariant['text_description']} [{number}]"


def traincheck(folder: Path) -> dict[str, set[str]]:
    (folder / "train.py").write_text(script(""))
    run(
        "traincheck-collect",
        "--pyscript",
        "train.py",
        "--models-to-track",
        "model",
        "--output-dir",
        "reference",
        within=folder,
    )
    run("traincheck-infer", "-f", "reference", "-o", "invariants.json", within=folder)
    in_health = violated(folder, "")
    return {fault: violated(folder, fault) - in_health for fault in CHANGES}


SCRIPT_PEERS: dict[str, Callable[[Path], dict[str, set[str]]]] = {
    "torch-preflight": preflight,
    "traincheck": traincheck,
}


def keep(row: Mapping[str, Any]) -> None:
    with PEERS.open("a") as file:
        file.write(f"{json.dumps(row)}\n")


def ask_all(peer: str, minutes: float) -> None:
    done = {key(row) for row in rows(PEERS) if row["peer"] == peer}
    patients = [key(row) for row in rows(SEALED) if is_patient(row)]
    end = time.monotonic() + 60 * minutes
    for patient in patients:
        if patient in done:
            continue
        keep(asked(peer, patient))
        if time.monotonic() > end:
            break
    ask_in_health(peer, patients)


def ask_in_health(peer: str, patients: Sequence[Patient]) -> None:
    """What it says of a control that it does not say of the same one with another seed."""
    seeds = sorted({patient.seed for patient in patients})
    for kind, architecture, task in sorted({each[:1] + each[2:4] for each in patients}):
        first, second = (said_of_control(peer, kind, architecture, task, seed) for seed in seeds)
        row = Patient(kind, "", architecture, task, seeds[1])._asdict()
        keep({"peer": peer, **row, "found": sorted(second - first)[:8], "error": ""})


def ask_of_scripts(peer: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for fault, said in SCRIPT_PEERS[peer](Path(folder)).items():
            keep({"peer": peer, "kind": "training", "fault": fault, "found": sorted(said)[:8]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=[*MODEL_PEERS, *SCRIPT_PEERS])
    parser.add_argument("--minutes", type=float, default=20)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.peer in MODEL_PEERS:
        ask_all(options.peer, options.minutes)
    else:
        ask_of_scripts(options.peer)


if __name__ == "__main__":
    main()
