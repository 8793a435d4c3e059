"""`ctrans study predict`: the protocol of `ctrans.study.prediction`, stage by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ctrans.cli.ending import CommandEnding, end
from ctrans.cli.study_request import StudyRequest, begins, carry_out, rest, tell_cost
from ctrans.report.files import png
from ctrans.report.prediction_report import calibration_words, correlations_table, prediction_figure, within_table
from ctrans.report.progress import progress_bar
from ctrans.stability.screening.predicted_rate import Predictor
from ctrans.study import export
from ctrans.study.carry_out import prospect
from ctrans.study.database import Store, open_store
from ctrans.study.description import Study
from ctrans.study.outcomes import losses, outcomes_of
from ctrans.study.prediction.architectures import REGIMES, prediction_study
from ctrans.study.prediction.evaluation import Evaluated, WithinPlacement, within_placements
from ctrans.study.prediction.fitting import to_text
from ctrans.study.prediction.protocol import (
    LEARNED_IN,
    Seal,
    add_predictors,
    break_seal,
    built,
    judged,
    kept_evaluation,
    known,
    missing,
    seal,
)
from ctrans.training.data import read_source
from solvers import ConfigError
from solvers.errors import look_up

NAME = "predict"
STAGES = {
    "predictors": "figures of the initial weights of all architectures",
    "build": "these, and the trainings of the two thirds that a predictor is built on",
    "sealed": "the trainings of the sealed third, once the predictor is committed, and their evaluation",
}


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What the protocol allows to be known by now; None where nothing is, and `why`. `sealed` is by regime: the sealed third as trained
    in it, beside what the predictor of `LEARNED_IN` says; `within` what orders architectures of one placement in both parts.
    """

    seal: Seal | None = None
    build: Evaluated | None = None
    predictor: Predictor | None = None
    sealed: Mapping[str, Evaluated] = dataclasses.field(default_factory=dict)
    within: Sequence[WithinPlacement] = ()
    why: str = ""


def predict(request: StudyRequest, directory: Path) -> None:
    """Carries out a stage, or tells its cost, or shows what is known. Raises ConfigError for what the protocol does not allow."""
    look_up("stage", request.stage, STAGES)
    study = prediction_study(request.regime, seal=request.stage == "sealed", budget=request.budget)
    if others := [f"--{name}" for name in ("file", "bin", "scale") if name in request.typed]:
        raise ConfigError(
            f"{' and '.join(others)}: the predictor, its baselines and what counts as having learned are of one text and one size: leave "
            "it out, or describe a study of your own in a TOML file"
        )
    if request.dry_run:
        tell_cost(request, study, directory)
        return
    with open_store(directory, write=not request.report) as store:
        if not request.report:
            _work(request, study, store)
        _end(request, study, store, directory)


def _work(request: StudyRequest, study: Study, store: Store) -> None:
    plan = prospect(study, store)
    if request.stage == "sealed":
        break_seal(store)
    if request.stage != "predictors" and plan.left:
        carry_out(request, plan, store)
    data = read_source(study.source, study.base["context"])
    with progress_bar("initial weights", missing(store)) as advance:
        add_predictors(store, data, advance)
    if request.stage == "sealed" and not prospect(study, store).left:
        judged(store, study, request.regime)


def found(store: Store) -> Allowed:
    """What is known by now."""
    kept = {regime: kept_evaluation(store, regime) for regime in REGIMES}
    sealed = {regime: each for regime, each in kept.items() if each is not None}
    learned = prediction_study(LEARNED_IN, seal=False)
    try:
        build, predictor = built(store, learned)
    except ConfigError as error:
        return Allowed(seal(store), sealed=sealed, why=str(error))
    within: list[WithinPlacement] = []
    if LEARNED_IN in sealed:
        tried = prediction_study(LEARNED_IN, seal=True)
        parts = {"two thirds": known(store, learned, sealed_third=False), "sealed third": known(store, tried, sealed_third=True)}
        within = within_placements(parts)
    return Allowed(seal(store), build, predictor, sealed, within)


def _end(request: StudyRequest, study: Study, store: Store, directory: Path) -> None:
    plan, here = prospect(study, store, as_begun=request.report), found(store)
    runs = plan.kept(store)
    files: dict[str, Callable[[], bytes]] = {}
    for each in request.formats:
        files |= export.files(each, store, outcomes_of(runs))
    shown = here.sealed.get(request.regime) or here.build
    if shown is not None:
        files["study.png"] = lambda: png(prediction_figure(shown))
    if here.predictor is not None:
        files["predictor.json"] = to_text(here.predictor).encode
    findings: dict[str, Any] = {**begins(study, plan), "outcomes": outcomes_of(runs), "losses": losses(runs), "prediction": here}
    said = f"{request.stage}: {len(plan.runs) - len(plan.left)} of {len(plan.runs)} runs are done{rest(plan)}. "
    ending = CommandEnding(
        findings=findings, page=list(_page(here)), options={"formats": list(request.formats)}, files=files, said=said
    )
    end(request, directory, ending)


def _page(here: Allowed) -> Iterator[str | Table]:
    if here.build is not None:
        yield from (
            correlations_table("two thirds, by cross-validation over families", here.build),
            calibration_words(here.build),
            "",
        )
    for regime, each in here.sealed.items():
        yield from (correlations_table(f"sealed third, {regime}", each), calibration_words(each))
        yield "" if regime == LEARNED_IN else f"The predictor, its interval and the medians were learned with {LEARNED_IN}.\n"
    if here.within:
        yield from (within_table(here.within), "")
    if here.seal is None:
        yield "The third is sealed: no training of it was begun."
    else:
        yield f"The seal was broken at {here.seal.date}, with the predictor of commit {here.seal.commit}."
    if here.why:
        yield f"No predictor yet: {here.why}."


def check_only_predict(request: StudyRequest) -> None:
    """Raises ConfigError for options of this study alone."""
    for name in ("stage", "regime"):
        if name in request.typed:
            raise ConfigError(f"--{name} is for ctrans study {NAME}: leave it out")


STAGE_HELP = f"Of predict: {'; '.join(f'{name} ({what})' for name, what in STAGES.items())}."
REGIME_HELP = f"Of predict: one of {', '.join(REGIMES)}. The predictor is learned with {LEARNED_IN}; the others try it elsewhere."
