"""Figures against dense algebra; the protocol's seal; and an evaluation that cannot flatter."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.prediction import architectures, protocol
from benchmarks.prediction.__main__ import main
from benchmarks.prediction.architectures import RATES, REGIMES, families, prediction_study, sealed
from benchmarks.prediction.evaluation import (
    FACTOR,
    PLACEMENT,
    PREDICTED,
    Known,
    WithinPlacement,
    evaluate,
    within_placements,
)
from benchmarks.prediction.fitting import COVERED, cross_validated, fit, to_text, with_interval
from benchmarks.prediction.hessian import PARTS, hessian_edges, largest_eigenvalue
from benchmarks.prediction.predicted_rate import (
    SEALED,
    TERMS,
    TRIED,
    predicted_rate,
    read_predictor,
)
from benchmarks.prediction.predictors import BASELINES, predictors, response
from benchmarks.prediction.scores import gradient_scores, naswot, synflow
from ctrans.measure.backward.curvature import ADAM_EPS
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.study.database import open_store
from ctrans.study.training import RunResult
from ctrans.training.data import from_text
from ctrans.training.data_sources import read_source
from solvers import ConfigError
from tests.cli.test_study import kept
from tests.training.helpers import TEXT

TINY = GPTConfig(
    vocab_size=7, context=4, depth=1, width=4, heads=2, embedding_std=0.5, initialisation="lecun"
)


def tiny(config=TINY):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 7, (PARTS, 5), generator=generator)
    return GPT(config).double(), tokens[:, :-1], tokens[:, 1:]


@pytest.mark.slow
def test_the_hessians_largest_eigenvalues_are_those_of_the_dense_matrices():
    """The dense ones by central differences of gradients, entry by entry."""
    model, tokens, targets = tiny()
    weights = list(model.parameters())

    def gradient(x=tokens, y=targets):
        return torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(model(x, y)[1], weights, materialize_grads=True)
            ]
        )

    dense = []
    with torch.no_grad():
        for weight in weights:
            for entry in range(weight.numel()):
                ends = []
                for step in (1e-5, -1e-5):
                    weight.view(-1)[entry] += step
                    with torch.enable_grad():
                        ends.append(gradient())
                    weight.view(-1)[entry] -= step
                dense.append((ends[0] - ends[1]) / 2e-5)
    dense = torch.stack(dense)
    dense = (dense + dense.mT) / 2
    parts = [gradient(x, y) for x, y in zip(tokens.chunk(PARTS), targets.chunk(PARTS), strict=True)]
    scale = (torch.stack(parts).square().mean(0).sqrt() + ADAM_EPS).rsqrt()
    plain, adam = hessian_edges(model, tokens, targets, steps=80)
    assert plain == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-6)
    assert adam == pytest.approx(
        float(torch.linalg.eigvalsh(scale[:, None] * dense * scale)[-1]), rel=1e-3
    )


def test_lanczos_finds_the_largest_and_not_the_largest_in_size():
    matrix = torch.diag(torch.tensor([-9.0, 1.0, 2.0, 3.0], dtype=torch.float64))
    assert largest_eigenvalue(
        lambda v: matrix @ v, torch.zeros(4, dtype=torch.float64)
    ) == pytest.approx(3.0)
    assert largest_eigenvalue(torch.zeros_like, torch.zeros(4, dtype=torch.float64)) == 0


def test_the_response_to_a_small_step_is_its_derivative():
    model, tokens, targets = tiny()
    ratios = [response(model, tokens, targets, eta) / eta for eta in (1e-6, 1e-7)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-4)
    assert response(model, tokens, targets, 1e-6) > 0


def test_scores_by_hand():
    model, tokens, targets = tiny()
    _, loss = model(tokens, targets)
    loss.backward()
    found = gradient_scores(model, tokens, targets)
    assert found["gradient norm"] == pytest.approx(
        float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    )
    assert found["SNIP"] == pytest.approx(
        sum(float((p.detach() * p.grad).abs().sum()) for p in model.parameters())
    )
    assert found["GradNorm"] == pytest.approx(sum(float(p.grad.norm()) for p in model.parameters()))
    assert math.isfinite(synflow(model))
    assert (
        naswot(model, tokens) < 0
    )  # a kernel of ones on its diagonal has a determinant of at most 1
    assert naswot(model, tokens[:1].expand(3, -1)) < naswot(
        model, tokens[:3]
    )  # equal sequences cannot be told apart


@pytest.mark.slow
def test_figures_of_an_architecture_are_all_there():
    figures = predictors(
        dataclasses.replace(TINY, vocab_size=256, context=8, width=16), from_text(TEXT, 8)
    )
    assert set(TERMS) <= figures.keys()
    assert set(BASELINES) - {"loss after 20 steps", "always pre"} <= figures.keys()
    assert all(math.isfinite(figures[name]) for name in TERMS)


@pytest.mark.slow
def test_there_are_enough_architectures_rates_and_seeds_and_the_split_is_by_family():
    cases = [json.dumps(fields, sort_keys=True) for each in families().values() for fields in each]
    assert len(cases) == len(set(cases)) >= 120
    assert RATES.keys() == REGIMES.keys()
    assert all(len(rates) >= 6 for rates in RATES.values())
    shares = [sealed(family) for family in families()]
    assert 0.2 < sum(shares) / len(shares) < 0.45
    assert sealed("placement output")
    assert not sealed("placement pre")
    build, kept = (prediction_study("adamw", seal=seal) for seal in (False, True))
    assert not {run.case for run in build.runs()} & {run.case for run in kept.runs()}
    assert (
        {run.case for run in [*build.runs(), *kept.runs()]} == set(protocol.cases()) == set(cases)
    )


def test_the_frozen_list_is_what_the_tables_gave_and_they_may_only_grow():
    """A later entry of a table is outside of what was studied; nothing that was studied changes its
    family or its part.
    """
    today = architectures.drawn()
    for family, frozen in architectures._frozen().items():
        assert today[family]["architectures"] == frozen["architectures"]


LAW = next(name for name, term in TERMS.items() if not term.plain)


def figures_of(generator):
    return {name: float(np.exp(generator.normal())) for name in TERMS} | {"blocks": 6.0}


def made_up(count=60, noise=0.0):
    """Architectures whose largest stable rate is one term's figure, or 1 over it, up to noise: of
    two placements alike.
    """
    generator = np.random.default_rng(0)
    found = []
    for i in range(count):
        figures = figures_of(generator)
        rate = -TERMS[LAW].value(figures[LAW]) + noise * generator.normal()
        case = json.dumps({"placement": ["pre", "peri"][i % 2], "i": i})
        found.append(Known(case, f"family {i % 10}", figures, rate, 1.0 + i, 2.0))
    return found


def test_a_predictor_finds_the_law_that_made_its_data_and_is_monotone():
    each = made_up(noise=0.05)
    predictor = fit([case.figures for case in each], [case.log_rate for case in each])
    assert predictor.slopes[LAW] == pytest.approx(1.0, abs=0.1)
    assert all(slope >= 0 for slope in predictor.slopes.values())
    worse = {**each[0].figures, LAW: each[0].figures[LAW] * 10 ** TERMS[LAW].sign}
    assert predictor.log_rate(worse) < predictor.log_rate(each[0].figures)
    assert math.isfinite(predictor.log_rate({LAW: None}))
    with pytest.raises(ConfigError, match="train more"):
        fit(
            [case.figures for case in each[: len(TERMS)]],
            [case.log_rate for case in each[: len(TERMS)]],
        )


@pytest.mark.slow
def test_architectures_that_learned_nothing_are_left_out_of_fit_and_evaluation():
    each = made_up(noise=0.1)
    blank = [dataclasses.replace(case, log_rate=math.nan) for case in each[:7]]
    figures, rates = [
        [getattr(case, name) for case in [*blank, *each]] for name in ("figures", "log_rate")
    ]
    assert fit(figures, rates) == fit(
        [case.figures for case in each], [case.log_rate for case in each]
    )
    predicted = cross_validated(figures, rates, [case.family for case in [*blank, *each]])
    mixed, plain = (
        evaluate([*blank, *each], predicted, [*blank, *each]),
        evaluate(each, predicted[7:], each),
    )
    assert mixed.unlearned == [case.case for case in blank]
    assert json.dumps(dataclasses.asdict(dataclasses.replace(mixed, unlearned=[]))) == json.dumps(
        dataclasses.asdict(plain)
    )


def test_a_family_whose_others_learned_too_little_has_no_prediction():
    """What did not learn at any rate is no more for the fit: as many with one as there are terms,
    and more architectures without.
    """
    each = made_up(len(TERMS))
    blank = [
        dataclasses.replace(case, family=f"blank {i}", log_rate=math.nan)
        for i, case in enumerate(each * 3)
    ]
    cases = [*blank, *each]
    predicted = cross_validated(
        [case.figures for case in cases],
        [case.log_rate for case in cases],
        [case.family for case in cases],
    )
    assert len(predicted) == len(cases)
    assert all(map(math.isnan, predicted))


@pytest.mark.slow
def test_the_interval_covers_what_it_says_and_a_model_beyond_what_was_studied_is_told():
    each = made_up(400, noise=0.3)
    figures, rates = [case.figures for case in each], [case.log_rate for case in each]
    predicted = cross_validated(figures, rates, [case.family for case in each])
    predictor = with_interval(fit(figures, rates), predicted, rates)
    # a normal's quantiles
    assert predictor.low == pytest.approx(1.2816 * 0.3, rel=0.15)
    assert predictor.high == pytest.approx(1.2816 * 0.3, rel=0.15)
    found = evaluate(each, predicted, each, (predictor.low, predictor.high))
    assert found.covered == pytest.approx(COVERED, abs=0.01)
    inside = next(each for each, guess in zip(figures, predicted, strict=True) if -2 < guess < -1)
    rate = predicted_rate(inside, predictor)
    assert rate.low < rate.rate < rate.high
    assert rate.outside == []
    assert predicted_rate({**inside, "blocks": 96.0}, predictor).outside == [
        "blocks 96, studied from 6 to 6"
    ]
    beyond = dataclasses.replace(predictor, constant=predictor.constant + 4)
    assert predicted_rate(inside, beyond).outside == ["rates were tried from 0.001 to 0.3 only"]
    assert (min(RATES["adamw"]), max(RATES["adamw"])) == TRIED
    with pytest.raises(ConfigError, match=f"{LAW} not known"):
        predicted_rate({**figures[0], LAW: math.nan}, predictor)


def test_the_placement_alone_is_a_baseline_from_other_families():
    each = made_up()
    moved = [
        dataclasses.replace(case, log_rate=case.log_rate - 9.0 * (case.placement == '"peri"'))
        for case in each
    ]
    found = evaluate(moved, [0.0] * len(moved), moved)
    (alone,) = [
        c
        for c in found.correlations
        if c.figure == PLACEMENT and c.outcome == "largest stable learning rate"
    ]
    assert alone.baseline
    assert alone.rho > 0.6  # two values beside many: at most .87
    near = 0
    for case in moved:
        others = [
            c.log_rate for c in moved if c.family != case.family and c.placement == case.placement
        ]
        near += abs(float(np.median(others)) - case.log_rate) <= math.log10(FACTOR)
    assert found.usual == pytest.approx(near / len(moved))
    assert set(found.by_placement) == {'"pre"', '"peri"'}


def test_a_family_is_predicted_without_itself():
    each = made_up()
    changed = [
        dataclasses.replace(case, log_rate=case.log_rate + 5.0 * (case.family == "family 3"))
        for case in each
    ]
    first, second = (
        cross_validated(
            [c.figures for c in cases], [c.log_rate for c in cases], [c.family for c in cases]
        )
        for cases in (each, changed)
    )
    for case, a, b in zip(each, first, second, strict=True):
        assert (a == b) == (case.family == "family 3")


@pytest.mark.slow
def test_an_evaluation_says_the_share_within_the_factor_and_ranks_by_spearman():
    each = made_up()
    exact = [case.log_rate for case in each]
    found = evaluate(each, exact, each)
    (best,) = [
        c
        for c in found.correlations
        if c.figure == PREDICTED and c.outcome == "largest stable learning rate"
    ]
    assert best.rho == pytest.approx(1.0)
    assert found.within == 1.0
    off = [rate + (2 * math.log10(FACTOR) if i % 4 == 0 else 0.0) for i, rate in enumerate(exact)]
    assert evaluate(each, off, each).within == pytest.approx(0.75)
    assert found.always_pre == 0.0  # no case is of the family whose median it is
    of_constant = [c for c in found.correlations if c.outcome == "best loss"]
    assert all(math.isnan(c.rho) for c in of_constant)


def committed(place, text):
    path = place / "predictor.json"
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    path.write_text(text)
    subprocess.run([*git, "add", "predictor.json"], check=True)
    subprocess.run([*git, "commit", "-qm", "the predictor"], check=True)
    return path


def with_runs(store, study):
    """Every run of the study, ended at once at a loss that its rate says."""
    done = []
    for run in study.runs():
        loss = 2.0 + abs(math.log10(run.training.learning_rate) + 2)
        curve = [
            {"step": 0, "validation_loss": 5.0},
            {"step": 20, "loss": 4.0},
            {"step": 400, "validation_loss": loss},
        ]
        done.append((run.key("made up"), run, RunResult("finished", "", curve, 0.0, {})))
    store.add(done, "")
    store.begin_on({64: "made up"})
    generator = np.random.default_rng(0)
    for case in {run.case for run in study.runs()}:
        protocol.put_predictors(store, case, figures_of(generator))


@pytest.mark.slow
def test_the_sealed_third_is_not_looked_at_before_the_predictors_commit_is_kept(
    tmp_path, monkeypatch
):
    """Not even where its runs are in the store."""
    few = {
        family: each[:2]
        for family, each in families().items()
        if family.startswith(("placement", "option"))
    }
    for module in (architectures, protocol):
        monkeypatch.setattr(module, "families", lambda: few)
    build, kept = (prediction_study("adamw", seal=seal) for seal in (False, True))
    with open_store(tmp_path / "study") as store:
        with_runs(store, build)
        with_runs(store, kept)
        _, predictor = protocol.built(store, build)
        with pytest.raises(ConfigError, match="may not be looked at"):
            protocol.known(store, kept, sealed_third=True)
        with pytest.raises(ConfigError, match="may not be looked at"):
            protocol.judged(store, kept, "adamw")
        with pytest.raises(ConfigError, match="fit one"):
            protocol.break_seal(store, tmp_path / "nowhere.json")
        (tmp_path / "loose.json").write_text(to_text(predictor))
        with pytest.raises(ConfigError, match="in no commit"):
            protocol.break_seal(store, tmp_path / "loose.json")
        assert protocol.seal(store) is None
        (tmp_path / "source").mkdir()
        path = committed(tmp_path / "source", to_text(predictor))
        path.write_text(to_text(dataclasses.replace(predictor, constant=0.0)))
        with pytest.raises(ConfigError, match="in no commit as it is"):
            protocol.break_seal(store, path)
        path.write_text(to_text(predictor))
        broken = protocol.break_seal(store, path)
        assert len(broken.commit) == 40
        # runs of other data, or of another length, are none of the study's
        strange = list(prediction_study("adamw", seal=True).runs())[:12]
        curve = [{"step": 0, "validation_loss": 5.0}, {"step": 400, "validation_loss": 1e-3}]
        store.add(
            [
                (run.key("another text"), run, RunResult("finished", "", curve, 0.0, {}))
                for run in strange
            ],
            "",
        )
        found = protocol.judged(store, kept, "adamw")
        assert all(case.best_loss > 1.0 for case in protocol.known(store, kept, sealed_third=True))
        assert {point["family"] for point in found.points} == {
            family for family in few if sealed(family)
        }
        # in another regime the same predictor is tried, though nothing was learned there
        elsewhere = prediction_study("sgd", seal=True)
        with pytest.raises(ConfigError, match="when all are"):
            protocol.judged(store, elsewhere, "sgd")
        with_runs(store, elsewhere)
        tried = protocol.judged(store, elsewhere, "sgd")
        guesses = [
            {point["case"]: point["predicted"] for point in each.points} for each in (found, tried)
        ]
        assert guesses[0] == guesses[1]
        assert not math.isnan(tried.usual)
        # once: the result stays, whatever becomes of predictor and runs
        store.connection.execute("DELETE FROM runs")
        assert json.dumps(dataclasses.asdict(protocol.judged(store, kept, "adamw"))) == json.dumps(
            dataclasses.asdict(found)
        )
        assert protocol.break_seal(store, path) == broken


def test_the_plateau_is_what_byte_frequencies_know():
    data = read_source({"file": None, "bin": None}, 8)
    train, validation = (
        np.bincount(np.asarray(each), minlength=256) for each in (data.train, data.validation)
    )
    loss = -(validation / validation.sum() * np.log((train + 1) / (train + 1).sum())).sum()
    if sys.version_info[:2] == (
        3,
        11,
    ):  # the text is a part of Python, and changes with its version
        assert loss == pytest.approx(protocol.PLATEAU, abs=0.01)
    assert data.frequencies_loss() == pytest.approx(
        loss, abs=1e-3
    )  # of the tokens up to the highest, not of all bytes


@pytest.mark.slow
def test_the_predictors_published_accuracy_is_what_the_kept_study_found(tmp_path):
    """And what was sealed is predicted by the committed predictor as it was on that day."""
    protocol.unpack(tmp_path)
    with open_store(tmp_path, write=False) as store:
        found, predictor = (
            protocol.kept_evaluation(store, "adamw"),
            protocol.Predictor(**store.about("predictor")),
        )
        figures = protocol.kept_predictors(store)
        build, fitted = protocol.built(store, prediction_study("adamw", seal=False))
    assert predictor == read_predictor()
    assert len(found.points) == SEALED["architectures"]
    said = [
        SEALED[name]
        for name in (
            "within a factor of 3",
            "in the interval",
            "their placement's median within it",
        )
    ]
    assert [found.within, found.covered, found.usual] == pytest.approx(said, abs=0.005)
    for point in found.points:
        assert predictor.log_rate(figures[point["case"]]) == pytest.approx(
            point["predicted"], rel=1e-12
        )
    assert fitted.slopes == pytest.approx(predictor.slopes)
    assert len(build.points) == predictor.architectures


def test_the_command_shows_the_two_thirds_and_keeps_the_third_sealed(tmp_path, monkeypatch):
    few = {
        family: each[:2]
        for family, each in families().items()
        if family.startswith(("placement", "option"))
    }
    for module in (architectures, protocol):
        monkeypatch.setattr(module, "families", lambda: few)
    generator = np.random.default_rng(0)
    study = prediction_study("adamw", seal=False)
    figures = {each.case: figures_of(generator) for each in study.runs()}

    def loss(each):
        return 2.0 + max(
            0.0,
            math.log10(
                each.training.learning_rate * 10 ** TERMS[LAW].value(figures[each.case][LAW]) / 0.01
            ),
        )

    kept(tmp_path, study, loss)
    with open_store(tmp_path) as store:
        for case, each in figures.items():
            protocol.put_predictors(store, case, each)
    result = CliRunner().invoke(main, ["--report", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "The third is sealed" in result.output
    found = json.loads((tmp_path / "study.json").read_text())["prediction"]
    assert found["sealed"] == {}
    assert found["seal"] is None
    assert found["predictor"]["architectures"] == len(figures)
    assert {point["case"] for point in found["build"]["points"]} == set(figures)
    assert json.loads((tmp_path / "predictor.json").read_text()) == found["predictor"]
    assert (tmp_path / "study.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stage", "all"), "'all' is not one of"),
        (("--regime", "adam"), "adamw"),
        (("--report",), "give the --out of a study"),
    ],
)
def test_a_wrong_request_of_the_command_is_one_line(arguments, said, tmp_path):
    result = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert said in result.output


@pytest.mark.slow
def test_it_is_evaluated_when_all_is_done(tmp_path):
    kept = prediction_study("adamw", seal=True)
    with open_store(tmp_path) as store:
        store.tell("seal", {"commit": "0" * 40, "date": ""})
        with pytest.raises(ConfigError, match="when all are"):
            protocol.judged(store, kept, "adamw")


def test_a_committed_predictor_is_read_back(tmp_path):
    each = made_up()
    rates = [case.log_rate for case in each]
    predictor = with_interval(fit([case.figures for case in each], rates), rates, rates)
    (tmp_path / "predictor.json").write_text(to_text(predictor))
    assert read_predictor(tmp_path / "predictor.json") == predictor
    (tmp_path / "predictor.json").write_text("{}")
    with pytest.raises(ConfigError, match="no predictor"):
        read_predictor(tmp_path / "predictor.json")


def test_what_orders_one_placement_has_one_sign_in_every_part():
    """`pre` is ordered by its figure, `peri` by nothing; a placement of few architectures is left
    out.
    """
    parts = {"one": made_up(60, noise=0.0), "other": made_up(40, noise=0.1)}
    lonely = dataclasses.replace(parts["one"][0], case=json.dumps({"placement": "post"}))
    parts["one"] = [*parts["one"], lonely]
    mixed = np.random.default_rng(1).permutation([case.log_rate for case in parts["other"]])
    parts["other"] = [
        dataclasses.replace(case, log_rate=float(rate)) if case.placement == '"peri"' else case
        for case, rate in zip(parts["other"], mixed, strict=True)
    ]
    found = within_placements(parts)
    assert {each.placement for each in found} == {'"pre"', '"peri"'}
    strongest = {
        placement: next(each for each in found if each.placement == placement)
        for placement in ('"pre"', '"peri"')
    }
    assert strongest['"pre"'].parts["one"].figure == LAW
    assert strongest['"pre"'].least > 0.9
    assert strongest['"peri"'].least < 0.5
    turned = WithinPlacement(
        '"pre"',
        {
            name: dataclasses.replace(strongest['"pre"'].parts["one"], rho=rho)
            for name, rho in (("a", 0.9), ("b", -0.9))
        },
    )
    assert turned.least == 0.0
