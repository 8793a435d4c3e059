"""`ctrans diagnose`, and what other commands make of the model that it names ill."""

import pytest

from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from tests.cli.test_commands import run, strict

SMALL = ["--depth", "2", "--width", "16", "--heads", "2", "--context", "12", "--batch", "1"]


@pytest.fixture
def dying(tmp_path):
    model = GPT(
        GPTConfig(
            depth=2,
            width=16,
            heads=2,
            context=12,
            placement="post",
            embedding_std=0.2,
            initialisation="xavier",
        )
    )
    model.depth.sublayers[3].state_norm.weight.data[5] = 4.8e-33
    save(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.cases(1)
@pytest.mark.parametrize("columns", [60, 80])
def test_the_dead_gain_is_named_first_with_place_and_figure(dying, columns, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run("diagnose", dying, "--batch", 1, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    page = result.stdout.partition("Written: ")[0]
    words = " ".join(page.split())
    assert (
        "1. dead gain around the state (serious) where block 1, FFN (segment 3), the norm around"
        " the state figure" in words
    )
    assert "|gamma| = 4.8e-33 in channel 5" in words
    assert "fix Set the gain to the norm's median" in words
    assert max(map(len, page.splitlines())) <= columns
    kept = strict((tmp_path / "out" / "diagnose.json").read_text())
    first, *_ = kept["placements"]["post"]["findings"]
    assert (first["check"], "(segment 3)" in first["place"]) == ("dead gain around the state", True)
    assert kept["checks"].keys() == CHECKS.keys()
    assert (tmp_path / "out" / "diagnose.png").read_bytes().startswith(b"\x89PNG")
    assert result.stderr == ""


@pytest.mark.slow
def test_a_healthy_model_says_so_for_each_placement(tmp_path):
    result = run(
        "diagnose",
        *SMALL,
        "--placement",
        "pre",
        "--placement",
        "peri",
        "--init",
        "xavier",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    assert "pre: nothing found in single parts; " in result.stdout
    assert "peri: nothing found in single parts; " in result.stdout


@pytest.mark.slow
def test_seeds_give_error_bars_of_other_texts_and_weights():
    args = [
        "diagnose",
        *SMALL,
        "--placement",
        "none",
        "--init",
        "xavier",
        "--embedding-std",
        "2",
        "--seeds",
        "3",
    ]
    found = strict(run(*args, "--json", "-").stdout)["placements"]["none"]
    worse = next(s for s in found["findings"] if s["check"] == "worse than guessing")
    assert (worse["seen"], worse["texts"], len(set(worse["values"]))) == (3, 3, 3)
    assert "seen in 3 of 3 walks, mean " in " ".join(
        run(*args, "--json", "/dev/null").stdout.split()
    )


@pytest.mark.slow
def test_other_commands_certify_what_they_can_and_say_what_serves_instead(dying, tmp_path):
    checked = run("hjb-check", "--checkpoint", dying, "--out", tmp_path / "a")
    assert checked.exit_code == 0, checked.output
    assert "there is no continuous costate" in " ".join(checked.stdout.split())
    assert "segment 3 (ffn) is skipped" in " ".join(checked.stdout.split())
    read = run("control", "--checkpoint", dying, "--out", tmp_path / "b")
    assert read.exit_code == 0, read.output
    kept = strict((tmp_path / "b" / "control.json").read_text())
    assert list(kept["placements"]["post"]["missing"]) == ["segment 3 (ffn)"]
    assert "ctrans uses the discrete model's" in kept["instead"]["post"]
    seen = run("screen", "--checkpoint", dying, "--quick", "--batch", 1, "--out", tmp_path / "c")
    assert seen.exit_code == 0, seen.output
    findings = " ".join(seen.stdout.partition("Findings, the most severe first")[2].split())
    assert findings.startswith(
        "1. dead gain around the state (serious) where block 1, FFN (segment 3)"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "'nowhere' does not exist"),
        (["nowhere", "--checkpoint", "elsewhere"], "does not exist"),
        (["--seeds", "0"], "seeds = 0"),
        (["--weight-decay", "nan", *SMALL], "weight_decay = nan"),
        (["--weight-decay", "-1", *SMALL], "weight_decay = -1.0"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2_and_nothing_written(
    args, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = run("diagnose", *args)
    assert (result.exit_code, result.stderr.count("\n"), words in result.stderr) == (
        2,
        1,
        True,
    ), result.output
    assert list(tmp_path.iterdir()) == []


def test_a_search_says_what_it_came_to_or_why_it_could_not(tmp_path):
    model = GPT(GPTConfig(depth=1, width=16, heads=2, context=16))
    save(model, tmp_path / "model")
    options = f"--context 16 --out {tmp_path / 'out'}"
    for search, words in (
        ("--search 60", "no edit passes, of"),
        ("--search 60 --batch 1", "tests what it finds on other sequences"),
        ("--search 1e-6", "the time ended before"),
    ):
        done = run(*f"diagnose {tmp_path / 'model'} {options} {search}".split())
        assert done.exit_code == 0, done.output
        assert words in " ".join(done.output.split())
    done = run(*f"diagnose {tmp_path / 'model'} {options} --search 5 --seeds 2".split())
    assert done.exit_code == 2
    assert "leave out --seeds" in done.output
