"""Placements on the command line: mixed ones by their spelling, and an eighth one from its entry
alone.
"""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.dynamics.placement import PLACEMENTS, Placement
from ctrans.report.placement_style import colour, looks_of, marker
from tests.helpers import old_command_note

SMALL = ["--depth", "2", "--width", "8", "--heads", "2", "--context", "6", "--batch", "1"]
QUICK = {
    "simulate": ["--no-reference"],
    "control": [],
    "hjb-check": ["--norm", "layernorm"],
    "screen": ["--quick"],
}
MIXED = ["post/pre", "output/none*1+deepnorm*1"]


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="ctrans")


def result(*args):
    done = run(*args, "--json", "-")
    assert (done.exit_code, done.stderr) == (0, old_command_note(args[0])), done.output
    return json.loads(done.stdout)


def names(command, found):
    """Under which names the result has its models."""
    if command == "hjb-check":
        return list(found["checks"]["layernorm"])
    return list(found["models" if command == "screen" else "placements"])


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK)
def test_mixed_placements_are_looked_at_under_their_canonical_names(command, tmp_path):
    chosen = (
        ["--compare", f"placement={','.join(MIXED)}"]
        if command == "screen"
        else [f"--placement={name}" for name in MIXED]
    )
    done = run(command, *chosen, *SMALL, *QUICK[command], "--out", tmp_path)
    assert (done.exit_code, done.stderr) == (0, old_command_note(command)), done.output
    assert names(command, json.loads((tmp_path / f"{command}.json").read_text())) == MIXED
    assert (tmp_path / f"{command}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_each_segment_is_judged_by_its_own_placement():
    found = result("control", "--placement", "pre/peri", *SMALL)["placements"]["pre/peri"]
    assert found["placements"] == ["pre", "peri"] * 2
    assert found["measures"] == ["cosine", "gap"] * 2
    (check,) = result("hjb-check", "--placement", "pre/peri", "--norm", "rmsnorm", *SMALL)[
        "checks"
    ]["rmsnorm"].values()
    verdicts = [segment["certificate"]["verdict"] for segment in check["segments"]]
    assert verdicts == ["degenerate", "well-posed for bounded gains"] * 2
    assert check["verdict"] == "degenerate"
    assert check["agrees"]


def test_two_equal_names_are_the_plain_placement():
    plain, mixed = (
        result("simulate", "--placement", name, *SMALL)["placements"]["peri"]
        for name in ("peri", "peri/peri")
    )
    for each in (plain, mixed):
        each.pop("seconds")
    assert plain == mixed


@pytest.mark.slow
def test_mixed_placements_are_trained(tmp_path):
    few = ["--batch", "2", "--iterations", "2", "--eval-windows", "2"]
    sizes = ["--depth", "2", "--width", "8", "--heads", "2", "--context", "6"]
    kept = result("train", "--placement", "post*1+pre*1", *sizes, *few, "--out", tmp_path)
    assert kept["model"]["placement"] == "post*1+pre*1"
    assert (
        "post*1+pre*1" in result("simulate", "--checkpoint", tmp_path, "--batch", "1")["placements"]
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["simulate", "--placement", "post/per"], "did you mean 'peri'"),
        (
            ["simulate", "--placement", "post*2+pre*2"],
            "is for 4 blocks and the model has 2: make them agree",
        ),
        (["simulate", "--placement", "post/"], "two as post/pre for attention and FFN"),
        (
            ["simulate", "--placement", "post*0+pre*2"],
            "'*0' is no number of blocks: give a whole number from 1",
        ),
        (["screen", "--compare", "placement=pre,post/per"], "did you mean 'peri'"),
        (
            ["hjb-check", "--placement", "post/pre", "--last-map-decay", "0.1"],
            "placement 'post' projects",
        ),
        (
            ["train", "--placement", "post*1+pre*1", "--eval-depth", "6"],
            "the model has no other depth",
        ),
    ],
)
def test_a_mistake_is_one_line(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*args, *SMALL)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_convergence_measures_steps_of_mixed_placements_and_says_that_it_knows_no_limit_of_their_depth(
    tmp_path,
):
    (row,) = result(
        "convergence", "--placement", "post/pre", "--method", "euler", "--limit", "substeps"
    )["results"]
    assert (row["placement"], row["order"]) == ("post/pre", pytest.approx(1, abs=0.15))
    refused = run("convergence", "--placement", "post/pre", "--out", tmp_path)
    assert (refused.exit_code, "choose the limit substeps" in refused.stderr) == (2, True)


DAMPED = dataclasses.replace(
    PLACEMENTS["pre_post"], name="damped", residual_gain=True, colour="C7", marker="<"
)
EVERYWHERE = Placement(
    "everywhere",
    input_norm=True,
    output_norm=True,
    state_norm=True,
    velocity="tangent part of N_out f(N_in X)",
    step="N(X + dt N_out f(N_in X))",
    seen_in="nobody",
)


@pytest.mark.cases(1)
@pytest.mark.parametrize("command", QUICK)
@pytest.mark.parametrize("eighth", [DAMPED, EVERYWHERE], ids=lambda placement: placement.name)
def test_an_eighth_placement_is_one_entry(eighth, command, tmp_path, monkeypatch):
    monkeypatch.setitem(PLACEMENTS, eighth.name, eighth)
    done = run(
        command,
        "--placement",
        "none",
        "--placement",
        eighth.name,
        *SMALL,
        *QUICK[command],
        "--out",
        tmp_path,
    )
    if (command, eighth) == ("control", EVERYWHERE):  # nobody knows its Hamiltonian
        assert (done.exit_code, "no closed form is known" in done.stderr) == (2, True)
        return
    assert (done.exit_code, done.stderr) == (0, old_command_note(command)), done.output
    if command == "simulate":
        kept = json.loads((tmp_path / "simulate.json").read_text())
        assert f"a step of the model is {eighth.step}" in str(kept["measured"]["reasons"])
    kept = json.loads((tmp_path / f"{command}.json").read_text())
    assert eighth.name in (
        kept["missing"] if command == "hjb-check" and eighth is EVERYWHERE else json.dumps(kept)
    )
    assert (tmp_path / f"{command}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_order_of_an_eighth_placement_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(PLACEMENTS, DAMPED.name, DAMPED)
    args = ["--placement", "damped", "--method", "euler", "--limit", "substeps", "--out", tmp_path]
    assert run("convergence", *args).exit_code == 0


def test_an_eighth_placement_is_drawn_by_its_entry(monkeypatch):
    monkeypatch.setitem(PLACEMENTS, DAMPED.name, DAMPED)
    assert (colour("damped"), marker("damped")) == ("C7", "<")
    assert (colour("post/pre"), marker("post/pre")) == ("0.4", "*")
    looks = looks_of([("a", "damped"), ("b", "damped"), ("a", "pre"), ("place", None)])
    assert [(look.colour, look.marker, look.repeat) for look in looks.values()][:2] == [
        ("C7", "<", 0),
        ("C7", "<", 1),
    ]
    assert list(looks) == ["a", "b", "place"]
