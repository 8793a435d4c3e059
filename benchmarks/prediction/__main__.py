"""The experiment, stage by stage.

python -m benchmarks.prediction --stage build          # in the repository
python benchmarks/prediction --report --stage sealed --out COPY_OF_benchmarks/results/study-predict
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from ctrans.base.threads import wait_passively

wait_passively()

import click
from rich.console import Console
from rich.table import Table

from benchmarks.prediction.architectures import REGIMES, prediction_study
from benchmarks.prediction.evaluation import Evaluated, WithinPlacement, within_placements
from benchmarks.prediction.fitting import to_text
from benchmarks.prediction.predicted_rate import Predictor
from benchmarks.prediction.protocol import (
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
    unpack,
)
from benchmarks.prediction.report import (
    calibration_words,
    correlations_table,
    prediction_figure,
    within_table,
)
from ctrans.cli.study_request import begins, carry_out, cost, engine
from ctrans.report.files import png, to_json, write_atomic
from ctrans.report.progress import progress_bar
from ctrans.study import export
from ctrans.study.carry_out import Prospect, prospect
from ctrans.study.database import FILE, Store, open_store
from ctrans.study.outcomes import losses, outcomes_of, stable_rule
from ctrans.training.data_sources import read_source
from solvers import ConfigError, SolveError

STAGES = {
    "predictors": "figures of the initial weights of all architectures",
    "build": "these figures, and the trainings of the two thirds that the predictor is built on",
    "sealed": (
        "the trainings of the sealed third, once the predictor is committed, and their evaluation"
    ),
}


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What the protocol allows to be known by now.

    - `build`, `predictor`: None where they are not known yet, and `why`
    - `sealed`: by regime, the sealed third as trained in it, next to what the predictor of
      `LEARNED_IN` says
    - `within`: which figures order the architectures of one placement in both parts
    """

    seal: Seal | None = None
    build: Evaluated | None = None
    predictor: Predictor | None = None
    sealed: Mapping[str, Evaluated] = dataclasses.field(default_factory=dict)
    within: Sequence[WithinPlacement] = ()
    why: str = ""


@click.command()
@click.option(
    "--stage",
    default="build",
    show_default=True,
    type=click.Choice(list(STAGES)),
    help="; ".join(f"{name}: {what}" for name, what in STAGES.items()),
)
@click.option(
    "--regime",
    default="adamw",
    show_default=True,
    type=click.Choice(list(REGIMES)),
    help="How the models are trained.",
)
@click.option(
    "--budget", type=float, help="Processor hours in all after which no further run begins."
)
@click.option(
    "--workers", type=int, help="Processes of one thread each.  [default: one for each processor]"
)
@click.option("--ray", metavar="ADDRESS", help="Train on the Ray cluster at this address.")
@click.option("--dry-run", is_flag=True, help="Only print what it costs: a short run is timed.")
@click.option(
    "--report", is_flag=True, help="Train nothing: make tables and picture anew from what is kept."
)
@click.option(
    "--kept",
    is_flag=True,
    help="As --report, of the runs in benchmarks/results, which are unpacked to --out first.",
)
@click.option(
    "--export",
    "formats",
    multiple=True,
    type=click.Choice(list(export.FORMATS)),
    help="Write the tables as files too.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("out/study/predict"), show_default=True
)
def main(
    stage: str,
    regime: str,
    budget: float | None,
    workers: int | None,
    ray: str | None,
    dry_run: bool,
    report: bool,
    kept: bool,
    formats: tuple[str, ...],
    out: Path,
) -> None:
    """Runs a stage of the experiment, or shows what is known so far."""
    study = prediction_study(regime, seal=stage == "sealed", budget=budget)
    try:
        if dry_run:
            print(
                "processor hours in all, and left:"
                f" {[round(each.processor_hours, 2) for each in cost(prospect(study, None))]}"
            )
            return
        if kept:
            unpack(out)
            report = True
        with open_store(out, write=not report) as store:
            print(*store.damaged, sep="\n", end="\n" * bool(store.damaged), file=sys.stderr)
            plan = prospect(study, store, as_begun=report)
            if not report:
                _run(stage, regime, plan, store, workers, ray)
                plan = prospect(study, store)
            _show(stage, regime, plan, store, formats, out)
    except (ConfigError, SolveError) as error:
        raise SystemExit(f"prediction: {error}") from None


def _run(
    stage: str, regime: str, plan: Prospect, store: Store, workers: int | None, ray: str | None
) -> None:
    if stage == "sealed":
        break_seal(store)
    if stage != "predictors" and plan.left:
        carry_out(plan, store, engine(workers, ray))
    data = read_source(plan.study.source, plan.study.base["context"])
    with progress_bar("initial weights", missing(store)) as advance:
        add_predictors(store, data, advance)
    if stage == "sealed" and not prospect(plan.study, store).left:
        judged(store, plan.study, regime)


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
        parts = {
            "two thirds": known(store, learned, sealed_third=False),
            "sealed third": known(store, tried, sealed_third=True),
        }
        within = within_placements(parts)
    return Allowed(seal(store), build, predictor, sealed, within)


def _show(
    stage: str, regime: str, plan: Prospect, store: Store, formats: Sequence[str], out: Path
) -> None:
    here, runs = found(store), plan.kept(store)
    outcomes = outcomes_of(runs)
    result: dict[str, Any] = {
        **begins(plan),
        "outcomes": outcomes,
        "losses": losses(runs),
        "prediction": here,
        "stable_rule": stable_rule(runs, None),
    }
    files = {"study.json": (to_json(result) + "\n").encode()}
    for each in formats:
        files |= {name: make() for name, make in export.files(each, store, outcomes).items()}
    shown = here.sealed.get(regime) or here.build
    if shown is not None:
        files["study.png"] = png(prediction_figure(shown))
    if here.predictor is not None:
        files["predictor.json"] = to_text(here.predictor).encode()
    for name, content in files.items():
        write_atomic(out / name, content)
    console = Console()
    for part in _page(here):
        console.print(part, highlight=False)
    console.print(
        f"{stage}: {len(plan.runs) - len(plan.left)} of {len(plan.runs)} runs are"
        f" done{rest(plan)}.",
        highlight=False,
    )
    console.print(f"Written to {out}: {', '.join([FILE, *files])}", highlight=False, soft_wrap=True)


def _page(here: Allowed) -> Iterator[str | Table]:
    if here.build is not None:
        yield from (
            correlations_table("two thirds, by cross-validation over families", here.build),
            calibration_words(here.build),
            "",
        )
    for regime, each in here.sealed.items():
        yield from (correlations_table(f"sealed third, {regime}", each), calibration_words(each))
        yield (
            ""
            if regime == LEARNED_IN
            else f"The predictor, its interval and the medians were learned with {LEARNED_IN}.\n"
        )
    if here.within:
        yield from (within_table(here.within), "")
    if here.seal is None:
        yield "The third is sealed: no training of it was begun."
    else:
        yield (
            f"The seal was broken at {here.seal.date}, with the predictor of commit"
            f" {here.seal.commit}."
        )
    if here.why:
        yield f"No predictor yet: {here.why}."


def rest(plan: Prospect) -> str:
    """How to run what is left, as the end of a sentence; "" if nothing is left."""
    if not plan.left:
        return ""
    return (
        "; the budget is spent: raise --budget"
        if plan.study.budget is not None
        else "; the same command continues"
    )


if __name__ == "__main__":
    main()
