"""A study's runs, and the one line that every mistake in its description gets."""

import dataclasses
import json

import pytest

from ctrans.study.description import Study
from ctrans.study.study_file import read_study
from ctrans.training.tasks import TASKS
from solvers import ConfigError
from tests.study.helpers import BASE, given, small


def test_runs_are_the_product_of_cases_rates_and_seeds():
    study = small(cases=[{"dt": 1.0}, {"dt": 0.1, "norm": "rmsnorm"}], seeds=[0, 3])
    found = {
        (
            run.model.dt,
            run.model.norm,
            run.model.placement,
            run.training.learning_rate,
            run.training.seed,
        )
        for run in study.runs()
    }
    assert len(found) == study.count == 16
    assert found == {
        (dt, norm, placement, rate, seed)
        for dt, norm in ((1.0, "layernorm"), (0.1, "rmsnorm"))
        for placement in ("pre", "peri")
        for rate in (1e-3, 1e-2)
        for seed in (0, 3)
    }
    assert all(run.training.iterations == 4 for run in study.runs())


def test_a_key_is_of_all_that_decides_a_run_and_of_nothing_else():
    run = small().runs()[0]
    assert run.key("data") == dataclasses.replace(run, varied={"other": "words"}).key("data")
    others = [
        dataclasses.replace(run, model=dataclasses.replace(run.model, dt=0.5)),
        dataclasses.replace(run, training=dataclasses.replace(run.training, clip=2.0)),
        dataclasses.replace(run, measure=("moments",)),
    ]
    keys = {run.key("data"), run.key("other data"), *(other.key("data") for other in others)}
    assert len(keys) == 5


def test_without_rates_the_base_has_one():
    assert [
        run.training.learning_rate for run in Study("a", base={**BASE, "learning_rate": 0.5}).runs()
    ] == [0.5]


def test_large_seeds_that_are_one_float_are_two():
    assert [
        run.training.seed for run in Study("a", base=BASE, seeds=[2**60, 2**60 + 1]).runs()
    ] == [2**60, 2**60 + 1]


WRONG = {
    "unknown field": ({"base": {"widht": 3}}, "width"),
    "wrong value": ({"base": {"width": 30, "heads": 4}}, "heads"),
    "wrong value in a list": ({"vary": {"placement": ["pre", "per"]}}, "peri"),
    "empty list": ({"vary": {"dt": []}}, "at least one value"),
    "no list": ({"vary": {"dt": 1.0}}, "list"),
    "a number twice": ({"vary": {"dt": [1, 1.0]}}, "twice"),
    "a case twice": ({"cases": [{}, {"dt": 1.0}]}, "two cases of small have the same runs"),
    "a value twice": ({"seeds": [0, 0]}, "twice"),
    "rates that vary": ({"vary": {"learning_rate": [1.0]}}, "learning_rates"),
    "a seed in the base": ({"base": {"seed": 5}}, "seed in base: give the list seeds"),
    "both": ({"vary": {"dt": [1.0]}, "cases": [{"dt": 0.1}]}, "dt varies in cases and in vary"),
    "a rate": ({"learning_rates": [0.0]}, "positive"),
    "a seed": ({"seeds": [0.5]}, "whole"),
    "a budget": ({"budget": -1.0}, "budget"),
    "a name": ({"name": "a/b"}, "name"),
    "a measure": ({"measure": ["moment"]}, "moments"),
    "what a task brings": (
        {"source": {"task": "digits"}},
        "task digits fixes (context|vocab_size): leave it out of base",
    ),
    "a task": ({"source": {"task": "digts"}}, "digits"),
    "too many": ({"seeds": list(range(50_001))}, "at most"),
}


@pytest.mark.cases(18)
@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_gets_one_line_with_the_fix(what):
    changes, said = WRONG[what]
    with pytest.raises(ConfigError, match=said) as caught:
        Study.__init__(object.__new__(Study), **{**given(), **changes})
    assert "\n" not in str(caught.value)


def test_a_file_says_what_the_same_object_says(tmp_path):
    (tmp_path / "book.txt").write_text("words")
    path = tmp_path / "mine.toml"
    path.write_text(
        'learning_rates = [1e-3]\nseeds = [1, 2]\nbudget = 2\nfile = "book.txt"\nmeasure ='
        ' ["moments"]\n[base]\ndepth = 2\nwidth = 16\n[vary]\nplacement = ["pre",'
        ' "peri"]\n[[cases]]\ndt = 0.5\n'
    )
    assert dataclasses.asdict(read_study(path)) == dataclasses.asdict(
        Study(
            "mine",
            base={"depth": 2, "width": 16},
            vary={"placement": ["pre", "peri"]},
            cases=[{"dt": 0.5}],
            learning_rates=[1e-3],
            seeds=[1, 2],
            measure=["moments"],
            budget=2,
            source={"file": str(tmp_path / "book.txt"), "bin": None},
        )
    )
    json.dumps(dataclasses.asdict(read_study(path)))


def test_a_task_brings_its_architecture_and_its_usual_settings(tmp_path):
    (tmp_path / "images.toml").write_text(
        'task = "digits"\n[base]\nwidth = 16\nheads = 2\nbatch = 5\n[vary]\ndt = [1.0, 0.5]\n'
    )
    study = read_study(tmp_path / "images.toml")
    assert study.source == {"task": "digits"}
    task = TASKS["digits"]
    for run in study.runs():
        assert (run.model.width, run.training.batch) == (16, 5)
        assert all(getattr(run.model, name) == value for name, value in task.architecture.items())
        assert run.training.iterations == task.settings["iterations"]


WRONG_FILES = {
    "no TOML": ("base = {", "no TOML"),
    "an unknown key": ("sedes = [1]", "seeds"),
    "a wrong type": ("seeds = 3", "list"),
    "no table": ("cases = [1]", r"\[\[cases\]\]"),
    "both": ('file = "a"\nbin = "b"', "exclude"),
    "a task and a file": ('file = "a"\ntask = "digits"', "file and task"),
    "one rate and several": ("learning_rates = [1.0]\n[base]\nlearning_rate = 2.0", "exclude"),
    "no number": ("budget = true", "budget"),
    "a date": ("[vary]\ndt = [1979-05-27]", "1979-05-27: give texts"),
    "a number beyond TOML's": (f"learning_rates = [1{400 * '0'}]", "1329 bits"),
    "such a number somewhere": (f"[base]\ndt = 1{400 * '0'}", "1329 bits"),
}


@pytest.mark.parametrize("what", WRONG_FILES)
def test_a_wrong_file_is_refused_by_name(what, tmp_path):
    content, said = WRONG_FILES[what]
    (tmp_path / "a.toml").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_study(tmp_path / "a.toml")


@pytest.mark.parametrize(
    "key",
    ["a" + ".a" * 400_000, '"a"' + '."a"' * 200_000, "a" + ".a" * 99, '","' + '.","' * 200_000],
)
def test_a_key_of_very_many_parts_is_named_at_once(key, tmp_path):
    (tmp_path / "s.toml").write_text(f"base.{key} = 1\n")
    with pytest.raises(ConfigError, match="nested more than 100 deep"):
        read_study(tmp_path / "s.toml")
