"""The protocol: what may be looked at when.

Figures of initial weights may be had of every architecture at any time. Trainings of the sealed
third may not begin, and what they gave may not be read, before `predictor.json` is in a commit of a
clean source tree and that commit's hash is in the store. They are evaluated once: what was found
then is kept, and shown from then on.
"""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import json
import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.prediction.architectures import BASE, families, prediction_study, sealed
from benchmarks.prediction.evaluation import Evaluated, Known, evaluate
from benchmarks.prediction.fitting import cross_validated, fit, with_interval
from benchmarks.prediction.predicted_rate import FILE, Predictor, read_predictor
from benchmarks.prediction.predictors import predictors
from ctrans.model.config import GPTConfig
from ctrans.study.carry_out import prospect
from ctrans.study.database import FILE as STORE
from ctrans.study.database import Finished, Store, finite
from ctrans.study.description import Study
from ctrans.study.outcomes import LEARNED, by_case, case_outcomes
from ctrans.training.data import Data
from solvers import ConfigError

KEPT = Path(__file__).parents[1] / "results" / "study-predict"
"""The experiment's runs."""
LEARNED_IN = "adamw"
"""The regime whose two thirds the predictor and its baselines are from; others try both where they
were not learned.
"""
AFTER, AT = 20, 2
"""The baseline that trains a little: the loss after so many steps, at the third of the rates."""
NEVER = math.log10(3.0)
"""By how much below the lowest rate a case counts of which no rate was stable, in powers of ten."""
PLATEAU = 3.25
"""Nats a byte of the training split's byte frequencies on the validation split: what a model knows
that has learned nothing else.
"""


def cases() -> dict[str, str]:
    """The family of every architecture, by the text that the store has for its case."""
    return {case_text(fields): family for family, each in families().items() for fields in each}


def case_text(fields: Mapping[str, Any]) -> str:
    """As `PlannedRun.case`."""
    return json.dumps(dict(fields), sort_keys=True)


TABLE = """
CREATE TABLE IF NOT EXISTS predictors (
    "case" TEXT NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY ("case", name)
) WITHOUT ROWID;
"""


def put_predictors(store: Store, case: str, figures: Mapping[str, float]) -> None:
    """Keeps figures of one case's initial weights in the study file."""
    rows = [(case, name, finite(value)) for name, value in figures.items()]
    with store.connection:
        store.connection.execute(TABLE)
        store.connection.executemany(
            'INSERT OR REPLACE INTO predictors ("case", name, value) VALUES (?, ?, ?)', rows
        )


def kept_predictors(store: Store) -> dict[str, dict[str, float | None]]:
    """Figures of initial weights by case and name; none of a study file without them."""
    found: dict[str, dict[str, float | None]] = {}
    if store.connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'predictors'").fetchone():
        for case, name, value in store.connection.execute(
            'SELECT "case", name, value FROM predictors ORDER BY "case", name'
        ):
            found.setdefault(case, {})[name] = value
    return found


def add_predictors(
    store: Store, data: Data, observe: Callable[[str], None] = lambda _: None
) -> None:
    """Figures of every architecture that has none yet, sealed or not, each kept at once."""
    done = kept_predictors(store)
    for family, each in families().items():
        for fields in each:
            if case_text(fields) not in done:
                settings = {**BASE, **fields}
                model = GPTConfig(
                    **{
                        name: value
                        for name, value in settings.items()
                        if name in GPTConfig.__dataclass_fields__
                    }
                )
                put_predictors(store, case_text(fields), predictors(model, data))
                observe(family)


def missing(store: Store) -> int:
    """How many architectures have no figures yet."""
    return len(cases().keys() - kept_predictors(store).keys())


@dataclasses.dataclass(frozen=True)
class Seal:
    """The commit that the predictor was in before a sealed training began, and when that was."""

    commit: str
    date: str


def break_seal(store: Store, path: Path = FILE) -> Seal:
    """Keeps the commit of the predictor in the store, once, and gives it. ConfigError where it is
    in no commit, where anything else of the source tree was changed since its commits, and where
    trainings of the two thirds are left.
    """
    kept = seal(store)
    if kept is not None:
        return kept
    predictor = read_predictor(path)
    commit = _git(path, "log", "-1", "--format=%H", "--", path.name)
    if not commit or _git(path, "status", "--porcelain", "--", path.name):
        raise ConfigError(
            f"{str(path)!r} is in no commit as it is: commit it before the sealed third is trained"
        )
    if changed := _git(path, "status", "--porcelain", "--untracked-files=no", "--", ":/"):
        raise ConfigError(
            f"the source tree is not as committed ({changed.splitlines()[0]}): commit what"
            " evaluates the predictor too"
        )
    if left := prospect(prediction_study(LEARNED_IN, seal=False), store, as_begun=True).left:
        raise ConfigError(f"{len(left)} trainings of the two thirds are left: --stage build first")
    broken = Seal(commit, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    store.tell("seal", dataclasses.asdict(broken))
    store.tell("predictor", dataclasses.asdict(predictor))
    return broken


def seal(store: Store) -> Seal | None:
    """The one that is kept; None while the third is sealed."""
    kept = store.about("seal")
    return None if kept is None else Seal(**kept)


def known(store: Store, study: Study, *, sealed_third: bool) -> list[Known]:
    """The architectures of that part whose runs are all done, with figures and outcomes. One that
    learned nothing at any rate has no largest stable one: nan. ConfigError for the sealed third
    while it is sealed.
    """
    if sealed_third and seal(store) is None:
        raise ConfigError(
            "the sealed third may not be looked at before the predictor is committed: --stage"
            " sealed records its commit"
        )
    wanted = {case: family for case, family in cases().items() if sealed(family) == sealed_third}
    figures, rates = kept_predictors(store), sorted(study.learning_rates)
    kept = prospect(study, store, as_begun=True).kept(
        store
    )  # by their keys: no run of other data, lengths or settings
    found = []
    for case, runs in by_case([run for run in kept if run.run.case in wanted]).items():
        full = len(
            {(run.run.training.learning_rate, run.run.training.seed) for run in runs}
        ) == len(rates) * len(study.seeds)
        if full and case in figures:
            outcomes = case_outcomes(runs)
            mine = {**figures[case], "loss after 20 steps": _early(runs, rates[AT])}
            log_rate = _log_rate(outcomes, rates[0])
            found.append(
                Known(
                    case,
                    wanted[case],
                    mine,
                    log_rate,
                    outcomes.get("sensitivity"),
                    outcomes.get("best loss"),
                )
            )
    return found


def _log_rate(outcomes: Mapping[str, float | None], lowest: float) -> float:
    best, rate = outcomes.get("best loss"), outcomes.get("largest stable learning rate")
    if best is None or best > PLATEAU - LEARNED:
        return math.nan
    return math.log10(lowest) - NEVER if rate is None else math.log10(rate)


def _early(runs: Sequence[Finished], rate: float) -> float | None:
    """The mean training loss of the iteration `AFTER` at that rate, over the runs that came so far;
    None where none did.
    """
    rows = [
        row
        for run in runs
        if run.run.training.learning_rate == rate
        for row in run.result.curve
        if row.get("step") == AFTER
    ]
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), float)]
    return sum(losses) / len(losses) if losses else None


def built(store: Store, study: Study) -> tuple[Evaluated, Predictor]:
    """What cross-validation by family finds on the two thirds, and the predictor of all of them."""
    each = known(store, study, sealed_third=False)
    figures, rates = [case.figures for case in each], [case.log_rate for case in each]
    predicted = cross_validated(figures, rates, [case.family for case in each])
    predictor = with_interval(fit(figures, rates), predicted, rates)
    return evaluate(each, predicted, each, (predictor.low, predictor.high)), predictor


def kept_evaluation(store: Store, regime: str) -> Evaluated | None:
    """What was found on the sealed third in that regime; None before."""
    kept = store.about(f"evaluation, {regime}")
    return None if kept is None else Evaluated.from_object(kept)


def judged(store: Store, study: Study, regime: str) -> Evaluated:
    """The evaluation on the sealed third in that regime: made once, when all its runs are done, and
    kept. The predictor is the committed one, learned in `LEARNED_IN` as the baselines are. Errors
    as `known`; ConfigError before.
    """
    kept = kept_evaluation(store, regime)
    if kept is not None:
        return kept
    each, wanted = known(store, study, sealed_third=True), sum(map(sealed, cases().values()))
    if len(each) < wanted:
        raise ConfigError(
            f"{len(each)} of {wanted} sealed architectures are done: it is evaluated once, when"
            " all are"
        )
    predictor = Predictor(**store.about("predictor"))
    build = known(store, prediction_study(LEARNED_IN, seal=False), sealed_third=False)
    found = evaluate(
        each,
        [predictor.log_rate(case.figures) for case in each],
        build,
        (predictor.low, predictor.high),
    )
    store.tell(f"evaluation, {regime}", dataclasses.asdict(found))
    return found


def unpack(directory: Path, kept: Path = KEPT) -> None:
    """Writes the study file that is kept compressed into that directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / STORE).write_bytes(gzip.decompress((kept / f"{STORE}.gz").read_bytes()))


def _git(path: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(path.parent), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
