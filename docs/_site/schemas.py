"""The JSON schema of each command's result, made from the classes of the results.

`python -m docs._site.schemas` writes the files of docs/schemas.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from ctrans.cli import COMMANDS
from ctrans.control.attained import Attained
from ctrans.control.decay_threshold import DecayThreshold
from ctrans.control.maximum_principle import MaximumPrinciple
from ctrans.control.model_check import ModelCheck
from ctrans.control.segment_check import SegmentCheck
from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.screening.attention import AttentionStep, InitialisationStep
from ctrans.examine.screening.backward import BackwardStep, TransportStep
from ctrans.examine.screening.case import StepVerdict
from ctrans.examine.screening.forward import ForwardStep
from ctrans.examine.screening.screen import Screening
from ctrans.examine.screening.screening_checks import STEPS, Quantity
from ctrans.examine.screening.updates import UpdateStep
from ctrans.interop.families import FoundFamily
from ctrans.measure.backward.token_exponents import TokenExponents
from ctrans.measure.findings import Check, Finding
from ctrans.measure.forward.contributions import ContributionsByDepth
from ctrans.measure.forward.simulation import Simulation
from ctrans.measure.forward.spectra import SpectrumFigures
from ctrans.model.config import GPTConfig
from ctrans.model.orders import Convergence
from ctrans.study.presets.claim import Verdict
from ctrans.study.rate_sweep import Rung
from ctrans.theory.verify import Result
from ctrans.training.coordinate_check import PlaceGrowth
from ctrans.training.monitor.log_lines import Header
from ctrans.training.monitor.post_mortem import PostMortem
from ctrans.training.settings import TrainConfig
from docs._site.json_schema import (
    Schema,
    a_map,
    an_object,
    described,
    list_of,
    schema_of,
    with_definitions,
)

DOCUMENTS = Path(__file__).parents[1] / "schemas"
OBJECT: Schema = {"type": "object"}
OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}
OPTIONS = described(
    "The command's options by name, with the values that the model or its size decided.", OBJECT
)
ENVIRONMENT = described(
    "What else the result depends on: versions, device, threads, plugins.", OBJECT
)
MODEL = described(
    "What ctrans recognised in an imported model, and what the model read; null for a GPT of"
    " ctrans. Of several named models, `several` has each by name.",
    OBJECT_OR_NULL,
)
EVIDENCE = a_map(
    "The weakest evidence of all segments; null if it does not apply. gap: (H - best)/|H| of the"
    " ascent over velocities. weights: the same over the last map's weights. kkt: residual of the"
    " closed form's maximiser. uniqueness: distance between maximisers from different starts."
    " exponent: the k in value ~ R^k that is farthest from its verdict's. gained: the same with"
    " trained gains.",
    float | None,
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
"""The class of the result of each screening step."""
FINDINGS = described("The most severe first; empty if ctrans found nothing.", list[Finding])
FLAGS = a_map("Quantities outside their limits, and the word for it.", str)


def _checks() -> Schema:
    segment = schema_of(
        SegmentCheck,
        verdict=described("Of the ODE, with the weight decay if one is given.", str),
        hamiltonian=described(
            "H under the verdict's assumptions; null if its size is unknown.", float | None
        ),
    )
    check = schema_of(
        ModelCheck,
        segments=list_of(segment),
        verdict=described("The weakest of the segments', for the ODE.", str),
        step_verdict=described("The same for the discrete model.", str),
        agrees=bool,
        failures=described("Findings that contradict the verdicts.", list[str]),
        evidence=EVIDENCE,
        step_evidence={"anyOf": [EVIDENCE, {"type": "null"}]},
        training_threshold=DecayThreshold | None,
        held=described(
            "Parameters that a weight decay does not bound and that must stay fixed: biases,"
            " gains.",
            list[str],
        ),
        largest=described("The segment with the largest costate.", int),
    )
    return {
        "findings": FINDINGS,
        "checks": a_map("By norm, then by placement.", a_map("By placement.", check)),
        "not_applicable": a_map("Why the regularization does not apply to a placement.", str),
        "pde": OBJECT_OR_NULL,
    }


def _screenings() -> Schema:
    def verdict(step: str) -> Schema:
        result: Any = RESULTS[step] | None if step in RESULTS else {}
        return schema_of(StepVerdict, result=result, flags=FLAGS)

    steps = an_object("By step.", **{step: verdict(step) for step in STEPS})
    screening = schema_of(Screening, steps=steps, findings=FINDINGS, flags=FLAGS)
    sides = {
        "low": float | None,
        "below": str,
        "high": float | None,
        "above": str,
        "mark": Literal["bad", "note"],
    }
    return {
        "quantities": a_map(
            "The measured quantities, with their limits and the words beyond them.",
            schema_of(Quantity, **sides),
        ),
        "models": a_map("By model: its placement, or its own settings.", screening),
    }


def _without(schema: Schema, name: str) -> Schema:
    properties = {key: value for key, value in schema["properties"].items() if key != name}
    return {**schema, "properties": properties, "required": list(properties)}


PAIRS = list[list[float]]
FIGURES = a_map("Figures by name; null if unknown.", float | None)
FLOORS = {
    "frequencies_loss": described(
        "The loss in nats per target of a model that knows only how often each target comes; null"
        " if the data are not known.",
        {"type": ["number", "null"]},
    ),
    "depthless_loss": described(
        "The loss of a table that knows only the current token and, for a task's rows, its place,"
        " as a model without depth does; null if the data are not known.",
        {"type": ["number", "null"]},
    ),
}
SPREAD = a_map("By name.", list[float])
BESIDE: Schema = {
    "lyapunov": {"anyOf": [schema_of(TokenExponents, words=list[str]), {"type": "null"}]},
    "spectra": list[SpectrumFigures] | None,
    "contributions": ContributionsByDepth | None,
}
"""The optional analyses of simulate; null without their options."""


RESULT_KEYS: dict[str, Schema] = {
    "simulate": {"placements": a_map("By placement.", schema_of(Simulation, **BESIDE))},
    "convergence": {"results": list_of(schema_of(Convergence, order=float))},
    "hjb-check": _checks(),
    "control": {
        "placements": a_map(
            "By placement: the maximum principle token by token.", MaximumPrinciple
        ),
        "attained": a_map(
            "By placement: what training attains, or why that is unknown.", Attained | str
        ),
        "instead": a_map("By placement: why the costate is the discrete model's, if it is.", str),
    },
    "diagnose": {
        "checks": a_map("The checks by name.", _without(schema_of(Check, measure=str), "measure")),
        "placements": a_map("By placement, or by the name of a model.", Diagnosis),
        "changes": a_map(
            "What changed from one of two models, or from the baseline, to another, and what"
            " weights would lose in a format. `segment` is the block where only weights were read.",
            Diagnosis,
        ),
        "treatment": described(
            "With --treat, lines that say what was changed in the copy, and for which findings no"
            " treatment is proven; else empty.",
            list[str],
        ),
    },
    "screen": _screenings(),
    "families": {"families": a_map("By the name in a config's model_type.", FoundFamily)},
    "verify": {
        "holds": bool,
        "findings": FINDINGS,
        "seconds": float,
        "statements": a_map("By name.", schema_of(Result, verdict=str)),
    },
    "train": {
        "ending": str,
        "message": str | None,
        "step": int,
        "model": GPTConfig,
        "training": TrainConfig,
        "parameters": int,
        "trained_parameters": described(
            "The number of trained parameters: fewer with low-rank adapters.", int
        ),
        "first_validation_loss": float | None,
        "validation_loss": float | None,
        "best_validation_loss": float | None,
        "best_step": int | None,
        "accuracy": described(
            "The share of correct held-out answers; null for a task without answers.", float | None
        ),
        "losses": an_object("Pairs of a step and a loss.", training=PAIRS, validation=PAIRS),
        "curves": an_object(
            "Pairs of a step and a figure.",
            learning_rate=PAIRS,
            gradient_norm=PAIRS,
            growth=PAIRS,
            largest=PAIRS,
        ),
        "other_depths": a_map("Validation loss by number of blocks.", float),
        **FLOORS,
        "seconds": float,
    },
    "study": {
        "study": described(
            "The description: base configuration, what varies, learning rates, seeds, data.", OBJECT
        ),
        "runs": described("The number of runs.", int),
        "done": described("The number of finished runs.", int),
        "failed": described(
            "The number of runs that failed. The same command tries them again.", int
        ),
        "cost": described(
            "With --dry-run, the remaining runs and their cost on this machine.", OBJECT_OR_NULL
        ),
        "outcomes": a_map("By case, as JSON text of what varies.", FIGURES),
        "losses": a_map(
            "By case: its learning rates, and over seeds the mean, lowest and highest final loss. A"
            " run that diverged counts with its loss before the first step.",
            SPREAD,
        ),
        "curves": a_map(
            "By case with one learning rate: iterations, and over its runs the validation loss.",
            SPREAD,
        ),
        "states": a_map(
            "By case that measured moments: segments, and over its trained models the mean |x|.",
            SPREAD,
        ),
        "verdict": Verdict | None,
        **FLOORS,
        "stable_rule": described(
            "The rule of the largest stable learning rates, its depthless floor and the loss of a"
            " guess in nats per target, and by case why it has no such rate; null before the first"
            " run.",
            OBJECT_OR_NULL,
        ),
    },
    "coordinate-check": {
        "sizes": dict[str, list[int]],
        "rates": list[float],
        "seeds": int,
        "updates": int,
        "growths": list[PlaceGrowth],
        "verdict": str,
        "answer": str,
    },
    "rate": {
        "rate": described("The largest stable learning rate; null with the reason.", float | None),
        "at_least": described("Whether it is the highest that was tried.", bool),
        "reason": str,
        "first": described("The loss before the first step.", float),
        "rungs": list[Rung],
        "gives_way": described("The first alarm at the lowest rate above it.", str),
        "steps": described("Of all trainings.", int),
        "cost": described("steps over --iterations.", float),
    },
    "export": {
        "family": described("The family of transformers, or nanoGPT.", str),
        "directory": str,
        "files": list[str],
    },
    "watch": {
        "log": Header,
        "ended": described("How the run ended; empty for a run that continues or was killed.", str),
        "steps": described("The steps of the reports.", list[int]),
        "loss": list[float],
        "last": a_map(
            "The last report's figures by gauge; lists are by depth.", float | list[float]
        ),
        "history": an_object(
            "Over time: figures of the run at every report, and by depth at `steps`, which are"
            " evenly chosen if there are many.",
            over_time=a_map("By gauge, at every report.", list[float]),
            steps=list[int],
            by_depth=a_map("By gauge, a list for each of `steps`.", list[list[float]]),
        ),
        "why": described(
            "With --why, what left its past, and when the loss and the 6-sigma rule did.",
            PostMortem | None,
        ),
        "findings": described("In the order in which they were reported.", list[Finding]),
        "probes": described(
            "Figures of each pass over the fixed batch, with its step.", list_of(OBJECT)
        ),
        "unknown": a_map("What the last report could not measure, and why.", str),
    },
    "generate": {
        "scheme": described("How the model's ODE is integrated, as in training.", OBJECT),
        "prompt": list[int],
        "samples": described("A continuation for each seed.", {"type": "array"}),
    },
    "report": {
        "results": a_map("By the parts of the files' paths that differ.", OBJECT),
        "chapters": described("The page's headings.", list[str]),
    },
}
"""The own keys of each command's result, after the common ones."""
OF_MODELS = ("simulate", "hjb-check", "control", "diagnose", "screen")
"""Commands that run models: their results describe imported models."""


def schema(command: str) -> Schema:
    """The schema of that command's result."""
    begins: dict[str, Schema] = {
        "command": {"const": command},
        "options": OPTIONS,
        "environment": ENVIRONMENT,
    }
    begins |= {"model": MODEL} if command in OF_MODELS else {}
    says = (
        f"{COMMANDS[command]} Numbers that JSON lacks are the texts inf, -inf and nan. null means"
        " that a figure does not apply or is unknown."
    )
    made = an_object(says, **begins, **RESULT_KEYS[command])
    start = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"ctrans {command}",
    }
    return with_definitions({**start, **made})


def as_text(command: str) -> str:
    """The schema as the text of a file."""
    return json.dumps(schema(command), indent=1) + "\n"


if __name__ == "__main__":
    for command in RESULT_KEYS:
        (DOCUMENTS / f"{command}.json").write_text(as_text(command))
