"""`ctrans screen` as users type it."""

import json
import re

import pytest
import torch
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.examine.screening.screen import STEPS
from ctrans.model.architectures import ARCHITECTURES, PLAIN, differences
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from tests.helpers import learned

SMALL = [
    "--quick",
    "--depth",
    "1",
    "--width",
    "8",
    "--heads",
    "2",
    "--context",
    "6",
    "--batch",
    "1",
]


def run(*args):
    return CliRunner().invoke(main, ["screen", *map(str, args)], prog_name="ctrans")


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
def test_one_model_gets_a_page_json_and_a_picture(tmp_path):
    result = run(*SMALL, "--verbose", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    kept = strict((tmp_path / "screen.json").read_text())
    (model,) = kept["models"].values()
    assert list(model["steps"]) == list(STEPS)
    assert all(finding["why"] for finding in model["steps"].values())
    assert (tmp_path / "screen.png").read_bytes().startswith(b"\x89PNG")
    assert set(kept["quantities"]) >= {
        what for finding in model["steps"].values() for what in finding["quantities"]
    }
    assert (
        f"peri: {len(model['flags'])} of " in result.stdout
        or "quantities within limits" in result.stdout
    )
    assert all(
        what in result.stdout
        for finding in model["steps"].values()
        for what in finding["quantities"]
    )
    table = result.stdout.partition("Verdicts")[2].partition(
        "is training a well-posed control\nproblem"
    )[0]
    for name, step in STEPS.items():
        # from the step's name to that of the next one: its question and its verdict
        row = re.search(rf"^{name} .*\n(?:  +\S.*\n)*", table, re.M)
        words = [*step.question.split(), *model["steps"][name]["verdict"].split()]
        assert sorted(row[0].split()) == sorted([name, *words])
    page = result.stdout.partition("Written: ")[0]
    assert max(map(len, page.splitlines())) <= 80
    assert result.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 60, 80])
def test_narrow_terminals_get_every_number_whole(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    page = run(*SMALL, "--placement", "pre", "--dt", "1e-6", "--verbose").stdout.partition(
        "Reasons"
    )[0]
    assert max(map(len, page.splitlines())) <= columns
    assert "…" not in page
    numbers = re.findall(r"\d\.\d+e-\d+", page)
    assert len(numbers) >= 3


@pytest.mark.slow
def test_every_combination_is_screened_and_none_is_ranked(tmp_path):
    result = run(
        *SMALL,
        "--compare",
        "placement=pre,peri",
        "--compare",
        "dt=1,0.1",
        "--verbose",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    kept = strict((tmp_path / "screen.json").read_text())
    assert set(kept["models"]) == {"pre, dt 1", "pre, dt 0.1", "peri, dt 1", "peri, dt 0.1"}
    assert kept["models"]["pre, dt 0.1"]["dt"] == 0.1
    assert "ranking" not in kept
    assert all("score" not in model for model in kept["models"].values())
    assert all(
        f"{name}: {step.question}" in " ".join(result.stdout.split())
        for name, step in STEPS.items()
        if name != "initialisation"
    )
    assert max(map(len, result.stdout.partition("Written: ")[0].splitlines())) <= 80


@pytest.mark.slow
def test_architectures_are_compared_by_name_and_many_of_them_by_their_verdicts(tmp_path):
    asked = "pre,llama,post:swiglu:dt=0.5,mixtral,none,post,peri,moe:norm=rmsnorm:placement=peri"
    result = run(*SMALL, "--compare", asked, "--heads", "2", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    models = strict((tmp_path / "screen.json").read_text())["models"]
    assert set(models) == set(asked.split(","))
    assert (models["post:swiglu:dt=0.5"]["placement"], models["post:swiglu:dt=0.5"]["dt"]) == (
        "post",
        0.5,
    )
    assert (models["llama"]["placement"], models["llama"]["norm"]) == ("pre", "rmsnorm")
    outside = [len(model["flags"]) for model in models.values()]
    assert outside == sorted(outside)
    assert "Fewest quantities outside of their limits first" in result.stdout
    assert (tmp_path / "screen.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_architectures_and_settings_are_combined():
    found = strict(
        run(*SMALL, "--compare", "pre,relu", "--compare", "dt=1,0.5", "--json", "-").stdout
    )["models"]
    assert set(found) == {"pre, dt 1", "pre, dt 0.5", "relu, dt 1", "relu, dt 0.5"}


@pytest.mark.cases(51)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_named_architecture_is_a_model(name):
    for blocks in (1, 12):
        config = GPTConfig(width=32, depth=blocks, **{**PLAIN, **differences(name, blocks)})
        assert GPT(config)(torch.zeros(1, 4, dtype=torch.int64))[0].isfinite().all()
    assert name.isascii()
    assert not set(name) & set(",:=")


@pytest.mark.slow
def test_json_to_stdout_is_alone_there_and_writes_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert strict(run(*SMALL, "--json", "-").stdout)["command"] == "screen"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_activations_that_overflow_exit_1_and_keep_the_rest(tmp_path):
    result = run(
        *SMALL,
        *("--placement", "none", "--depth", "6", "--dt", "1e37", "--init", "large"),
        *("--out", tmp_path),
    )
    assert result.exit_code == 1
    assert "ctrans: none: activations become non-finite in segment" in result.stderr
    assert "Traceback" not in result.output
    (model,) = strict((tmp_path / "screen.json").read_text())["models"].values()
    assert model["broken"] is not None
    assert model["steps"]["forward"]["result"]["mean_abs"]
    assert (tmp_path / "screen.png").exists()


def test_a_step_that_does_not_apply_to_a_saved_model_says_so_and_exits_0(tmp_path):
    config = GPTConfig(depth=1, width=8, heads=2, context=6, placement="post", qk_norm=True)
    model = learned(GPT(config, seed=5))
    model.depth.sublayers[0].state_norm.weight.data[2] = 0
    save(model, tmp_path)
    result = run("--checkpoint", tmp_path, "--quick", "--batch", 1, "--json", "-")
    assert result.exit_code == 0, result.output
    (found,) = strict(result.stdout)["models"].values()
    assert "gamma[2] = 0" in found["steps"]["well-posedness"]["missing"]["segment 0 (attention)"]
    assert [s["segment"] for s in found["steps"]["well-posedness"]["result"]["segments"]] == [1]
    assert "qk_norm" in found["steps"]["attention"]["why"]
    assert found["steps"]["attention"]["quantities"]["attention path"] > 0
    assert found["steps"]["forward"]["quantities"]["added by depth"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--compare", "dt"], "unknown architecture 'dt'"),
        (["--compare", "lama"], "did you mean 'llama'"),
        (["--compare", "pre:dt=1,2"], "unknown architecture '2'"),
        (["--compare", "pre:norm=lnorm"], "did you mean"),
        (["--compare", "dt=x"], "give numbers separated by commas"),
        (["--compare", "dt=0"], "dt = 0.0"),
        (["--compare", "dts=1"], "did you mean 'dt'"),
        (["--compare", "placement=perri"], "did you mean 'peri'"),
        (["--compare", "init=kaiming"], "unknown initialisation 'kaiming'"),
        (["--compare", "placement=pre", "--placement", "peri"], "given twice"),
        (["--compare", "dt=1", "--compare", "dt=0.1"], "dt is given twice"),
        (["--compare", "dt=1", "--checkpoint", "x"], "leave out --compare"),
        (["--checkpoint", "nowhere"], "there is no checkpoint"),
        (["--dtype", "bfloat16"], "too coarse"),
        (["--text", "x"], "at least two tokens"),
        (["--batch", "0"], "batch = 0"),
        (["--width", "-2"], "width = -2"),
        (["--out", "/proc/nothing"], "cannot write to directory"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2_and_nothing_written(
    args, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("ctrans: ")
    assert words in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []
