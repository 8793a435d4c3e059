"""The JSON schema of every command's result, from the classes that hold it: docs/schemas has them
as files.

`python -m ctrans.cli.schemas docs/schemas` writes them anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ctrans.cli import COMMANDS
from ctrans.control.attained import Attained
from ctrans.control.decay_threshold import DecayThreshold
from ctrans.control.maximum_principle import MaximumPrinciple
from ctrans.control.model_check import ModelCheck
from ctrans.control.segment_check import SegmentCheck
from ctrans.findings import Check, Finding
from ctrans.interop.families import FoundFamily
from ctrans.model.config import GPTConfig
from ctrans.model.orders import Convergence
from ctrans.monitor.log_lines import Header
from ctrans.report.schema import NUMBER, Schema, a_map, an_object, described, one_of, schema_of, with_definitions
from ctrans.stability.backward.token_exponents import TokenExponents
from ctrans.stability.diagnosis.diagnose import Diagnosis
from ctrans.stability.forward.contributions import ContributionsByDepth
from ctrans.stability.forward.simulation import Simulation
from ctrans.stability.forward.spectra import SpectrumFigures
from ctrans.stability.screening.attention import AttentionStep, InitialisationStep
from ctrans.stability.screening.backward import BackwardStep, TransportStep
from ctrans.stability.screening.case import StepVerdict
from ctrans.stability.screening.forward import ForwardStep
from ctrans.stability.screening.screen import Screening
from ctrans.stability.screening.screening_checks import STEPS, Quantity
from ctrans.stability.screening.updates import UpdateStep
from ctrans.study.presets.claim import Verdict
from ctrans.training.coordinate_check import Coordinates, Power
from ctrans.training.settings import TrainConfig
from ctrans.verify.run import Result

WORD, TRUTH, WHOLE = schema_of(str), schema_of(bool), schema_of(int)
WORDS = schema_of(list[str])
OPTIONS = described(
    "The command's options by name, with what became of those that the model or its size decided.", {"type": "object"}
)
ENVIRONMENT = described("What the result depends on beside the options: versions, device, threads, plugins.", {"type": "object"})
MODEL = described(
    "What was recognised in an imported model, and what it read; null for one of ours. Where several were named, `several` has each by "
    "name.",
    {"type": ["object", "null"]},
)
EVIDENCE = a_map(
    "The weakest evidence of all segments; null where it does not apply. gap: (H - best)/|H| of the ascent over velocities. weights: of "
    "that over the last map's weights. kkt: residual of the closed form's maximiser. uniqueness: distance between maximisers from "
    "different starts. exponent: k of value ~ R^k that is farthest from what its verdict says. gained: the same with gains too.",
    schema_of(float | None),
)
RESULTS: dict[str, type] = {
    "well-posedness": ModelCheck,
    "forward": ForwardStep,
    "backward": BackwardStep,
    "transport": TransportStep,
    "attention": AttentionStep,
    "updates": UpdateStep,
    "initialisation": InitialisationStep,
}
"""What a step of the screening keeps as its result."""
FINDINGS = described("The most severe first; empty where nothing was found.", schema_of(list[Finding]))
FLAGS = a_map("Quantities outside of their limits, and what they are called there.", WORD)


def _checks() -> dict[str, Schema]:
    number = schema_of(float | None)
    segment = schema_of(
        SegmentCheck,
        verdict=described("Of the ODE, or what the weight decay asked about makes of it.", WORD),
        hamiltonian=described("H under what the verdict assumes; null where it is not known how large.", number),
    )
    check = schema_of(
        ModelCheck,
        segments={"type": "array", "items": segment},
        verdict=described("The weakest of the segments', for the ODE.", WORD),
        step_verdict=described("The same for the discrete model.", WORD),
        agrees=TRUTH,
        failures=described("Findings that do not support the verdicts.", WORDS),
        evidence=EVIDENCE,
        step_evidence={"anyOf": [EVIDENCE, {"type": "null"}]},
        training_threshold=schema_of(DecayThreshold | None),
        held=described("What must not be trained freely beside a weight decay: biases, gains.", WORDS),
        largest=described("The segment with the largest costate.", WHOLE),
    )
    return {
        "findings": FINDINGS,
        "checks": a_map("By norm, then by placement.", a_map("By placement.", check)),
        "not_applicable": a_map("Why a placement takes no such remedy.", WORD),
        "pde": {"type": ["object", "null"]},
    }


def _screenings() -> dict[str, Schema]:
    def verdict(step: str) -> Schema:
        result = one_of(RESULTS[step], type(None)) if step in RESULTS else {}
        return schema_of(StepVerdict, result=result, flags=FLAGS)

    steps = an_object("By step.", **{step: verdict(step) for step in STEPS})
    screening = schema_of(Screening, steps=steps, findings=FINDINGS, flags=FLAGS)
    limit = schema_of(float | None)
    sides = {"low": limit, "below": WORD, "high": limit, "above": WORD, "mark": schema_of(Literal["bad", "note"])}
    return {
        "quantities": a_map("What is measured, with its limits and what it is called beyond them.", schema_of(Quantity, **sides)),
        "models": a_map("By model: its placement, or what sets it apart.", screening),
    }


def _without(schema: Schema, name: str) -> Schema:
    properties = {key: value for key, value in schema["properties"].items() if key != name}
    return {**schema, "properties": properties, "required": list(properties)}


def _statements() -> dict[str, Schema]:
    statement = schema_of(Result, verdict=WORD)
    return {"holds": TRUTH, "findings": FINDINGS, "seconds": NUMBER, "statements": a_map("By name.", statement)}


PAIRS: Schema = {"type": "array", "items": {"type": "array", "items": NUMBER}}


def _trained() -> dict[str, Schema]:
    return {
        "ending": WORD,
        "message": schema_of(str | None),
        "step": WHOLE,
        "model": schema_of(GPTConfig),
        "training": schema_of(TrainConfig),
        "parameters": WHOLE,
        "trained_parameters": described("How many of them are trained: fewer with adapters of low rank.", WHOLE),
        "first_validation_loss": schema_of(float | None),
        "validation_loss": schema_of(float | None),
        "best_validation_loss": schema_of(float | None),
        "best_step": schema_of(int | None),
        "accuracy": described("The share of held-out answers that are right, of a task with answers.", schema_of(float | None)),
        "losses": an_object("Pairs of a step and a loss.", training=PAIRS, validation=PAIRS),
        "curves": an_object(
            "Pairs of a step and a figure.", learning_rate=PAIRS, gradient_norm=PAIRS, growth=PAIRS, largest=PAIRS
        ),
        "other_depths": a_map("Validation loss by number of blocks.", NUMBER),
        "seconds": NUMBER,
    }


def _studied() -> dict[str, Schema]:
    figures = a_map("Figures by name; null where not known.", schema_of(float | None))
    spread = a_map("By name.", schema_of(list[float]))
    return {
        "study": described("The description: base configuration, what varies, learning rates, seeds, data.", {"type": "object"}),
        "runs": described("How many runs it has.", WHOLE),
        "done": described("How many of them are kept.", WHOLE),
        "cost": described("With --dry-run, what is left to do and what that costs here.", {"type": ["object", "null"]}),
        "outcomes": a_map("By case, as JSON text of what varies.", figures),
        "losses": a_map(
            "By case: its learning rates, and over seeds the mean, lowest and highest loss at the end; that before the first step for "
            "a run that diverged.",
            spread,
        ),
        "curves": a_map("By case with one learning rate: iterations, and over its runs the validation loss.", spread),
        "states": a_map("By case that measured moments: segments, and over its trained models the mean |x|.", spread),
        "verdict": one_of(Verdict, type(None)),
        "frequencies_loss": described(
            "Nats a token where a model ends that knows how often tokens come and nothing else; null for a task.",
            {"type": ["number", "null"]},
        ),
        "prediction": described(
            "Of the experiment benchmarks/prediction; null otherwise.",
            {"type": ["object", "null"]},
        ),
    }


def _beside() -> dict[str, Schema]:
    """What simulate looks at beside the trajectory; null where it was not asked for."""
    return {
        "lyapunov": {"anyOf": [schema_of(TokenExponents, words=WORDS), schema_of(type(None))]},
        "spectra": one_of(list[SpectrumFigures], type(None)),
        "contributions": one_of(ContributionsByDepth, type(None)),
    }


RESULT_KEYS: dict[str, Callable[[], dict[str, Schema]]] = {
    "simulate": lambda: {"placements": a_map("By placement.", schema_of(Simulation, **_beside()))},
    "convergence": lambda: {"results": {"type": "array", "items": schema_of(Convergence, order=NUMBER)}},
    "hjb-check": _checks,
    "control": lambda: {
        "placements": a_map("By placement: the maximum principle token by token.", schema_of(MaximumPrinciple)),
        "attained": a_map("By placement: what training attains, or why that is not known.", one_of(Attained, str)),
        "instead": a_map("By placement: why the discrete model's costate serves, where it does.", WORD),
    },
    "diagnose": lambda: {
        "checks": a_map("What was looked for, by name.", _without(schema_of(Check, measure=WORD), "measure")),
        "placements": a_map("By placement.", schema_of(Diagnosis)),
    },
    "screen": _screenings,
    "families": lambda: {"families": a_map("By the name in a config's model_type.", schema_of(FoundFamily))},
    "verify": _statements,
    "train": _trained,
    "study": _studied,
    "coordinate-check": lambda: {
        "widths": {"type": "array", "items": NUMBER},
        "places": WORDS,
        "coordinates": {"type": "array", "items": schema_of(Coordinates)},
        "size_powers": described("By update and place: k and its standard error.", schema_of(list[list[Power]])),
        "change_powers": described("By update and place: k and its standard error.", schema_of(list[list[Power]])),
        "verdict": WORD,
    },
    "export": lambda: {
        "family": described("What it is there: a family of transformers, or nanoGPT.", WORD),
        "directory": WORD,
        "files": WORDS,
    },
    "watch": lambda: {
        "log": schema_of(Header),
        "ended": described("How the run ended; empty for one that goes on or was killed.", WORD),
        "steps": described("Of the reports.", schema_of(list[int])),
        "loss": schema_of(list[float]),
        "last": a_map("The last report's figures by gauge; lists are by depth.", one_of(float, list[float])),
        "history": an_object(
            "Over time: figures of the run at every report, and by depth at `steps`, evenly chosen where the log has more.",
            over_time=a_map("By gauge, at every report.", schema_of(list[float])),
            steps=schema_of(list[int]),
            by_depth=a_map("By gauge, a list for each of `steps`.", schema_of(list[list[float]])),
        ),
        "findings": described("In the order in which they were reported.", schema_of(list[Finding])),
        "probes": described(
            "Figures of each walk on the held batch, with its step.", {"type": "array", "items": {"type": "object"}}
        ),
        "unknown": a_map("What the last report could not look at, and why.", WORD),
    },
    "generate": lambda: {
        "scheme": described("How the model's ODE is integrated, as it was trained.", {"type": "object"}),
        "prompt": schema_of(list[int]),
        "samples": described("A continuation for each seed.", {"type": "array"}),
    },
    "report": lambda: {
        "results": a_map("By what tells the files apart: whose result it is.", {"type": "object"}),
        "chapters": described("The page's headings.", WORDS),
    },
}
"""The keys of each command's result after those that all begin with."""
OF_MODELS = ("simulate", "hjb-check", "control", "diagnose", "screen")
"""Commands that look at models, which say what was recognised in one that was imported."""


def schema(command: str) -> Schema:
    """The schema of that command's result."""
    begins: dict[str, Schema] = {"command": {"const": command}, "options": OPTIONS, "environment": ENVIRONMENT}
    begins |= {"model": MODEL} if command in OF_MODELS else {}
    says = (
        f"{COMMANDS[command]} Numbers that JSON lacks are the texts inf, -inf and nan; null says that a figure does not apply or is not "
        "known."
    )
    made = an_object(says, **begins, **RESULT_KEYS[command]())
    start = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"ctrans {command}"}
    return with_definitions({**start, **made})


def as_text(command: str) -> str:
    """The schema as a file has it."""
    return json.dumps(schema(command), indent=1) + "\n"


def write(directory: Path) -> None:
    """Writes every command's schema there."""
    directory.mkdir(parents=True, exist_ok=True)
    for command in RESULT_KEYS:
        (directory / f"{command}.json").write_text(as_text(command))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
