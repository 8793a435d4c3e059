"""`--attention` and `--ffn`: a new kind is one entry of its table."""

import json

import pytest
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.dynamics.fields import ATTENTIONS, FFNS, Attention, FeedForward
from ctrans.model.checkpoint import load
from tests.helpers import old_command_note

SIZES = ["--depth", "1", "--width", "8", "--heads", "2", "--context", "6"]


class Warm(Attention):
    """Softmax attention at twice the temperature."""

    def __init__(self, settings):
        super().__init__(settings.width, settings.heads, temperature=2 * settings.temperature)


class Narrow(FeedForward):
    """An MLP of half the features."""

    def __init__(self, settings):
        super().__init__(settings.width, settings.hidden_width // 2, activation=settings.activation)


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "warm", Warm)
    monkeypatch.setitem(FFNS, "narrow", Narrow)


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="ctrans")


def result(*args):
    done = run(*args, "--json", "-")
    assert (done.exit_code, done.stderr) == (0, old_command_note(args[0])), done.output
    return json.loads(done.stdout)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("simulate", ["--no-reference"]),
        ("control", []),
        ("hjb-check", ["--kinetic", "0.1"]),
        ("screen", ["--quick"]),
    ],
)
def test_every_command_takes_a_new_kind(command, more):
    own, plain = (
        result(command, *SIZES, "--batch", "1", "--placement", "peri", *more, *kind)
        for kind in (["--attention", "warm", "--ffn", "narrow"], [])
    )
    assert (own["options"]["attention"], own["options"]["ffn"]) == ("warm", "narrow")
    assert (plain["options"]["attention"], plain["options"]["ffn"]) == ("softmax", "mlp")
    key = {"hjb-check": "checks", "screen": "models"}.get(command, "placements")
    assert own[key] != plain[key]


@pytest.mark.slow
def test_kinds_are_compared():
    found = result(
        "screen",
        *SIZES,
        "--batch",
        "1",
        "--quick",
        "--compare",
        "attention=all",
        "--compare",
        "ffn=mlp,narrow",
    )
    assert set(found["models"]) == {
        f"peri, attention {attention}, ffn {ffn}"
        for attention in ATTENTIONS
        for ffn in ("mlp", "narrow")
    }


@pytest.mark.slow
def test_a_new_kind_is_trained_and_found_again(tmp_path):
    few = ["--batch", "2", "--iterations", "2", "--eval-windows", "2"]
    kept = result(
        "train", "--attention", "warm", "--ffn", "narrow", *SIZES, *few, "--out", tmp_path
    )
    assert (kept["model"]["attention"], kept["model"]["ffn"]) == ("warm", "narrow")
    assert isinstance(load(tmp_path).depth.sublayers[0].field, Warm)
    assert (
        result("simulate", "--checkpoint", tmp_path, "--batch", "1")["options"]["attention"]
        == "warm"
    )
    contradicted = run("train", "--resume", "--attention", "softmax", "--out", tmp_path)
    assert (contradicted.exit_code, "--attention softmax contradicts" in contradicted.stderr) == (
        2,
        True,
    )


OPTIONS = [
    "--positions",
    "rotary",
    "--kv-heads",
    "1",
    "--qk-norm",
    "--window",
    "4",
    "--softcap",
    "20",
    "--ffn",
    "swiglu",
]


@pytest.mark.slow
def test_options_of_the_maps_are_trained_and_found_again(tmp_path):
    few = ["--batch", "2", "--iterations", "2", "--eval-windows", "2"]
    kept = result("train", *OPTIONS, *SIZES, *few, "--out", tmp_path)["model"]
    assert (kept["positions"], kept["kv_heads"], kept["qk_norm"], kept["window"]) == (
        "rotary",
        1,
        "rms",
        4,
    )
    assert load(tmp_path).depth.sublayers[0].field.groups == 1
    assert (
        result("simulate", "--checkpoint", tmp_path, "--batch", "1")["options"]["positions"]
        == "rotary"
    )
    contradicted = run("train", "--resume", "--window", "5", "--out", tmp_path)
    assert (contradicted.exit_code, "--window 5 contradicts" in contradicted.stderr) == (2, True)


@pytest.mark.slow
def test_options_are_compared_by_name():
    compared = ["--compare", "window=none,2", "--compare", "qk-norm=l2", "--compare", "sinks=yes"]
    found = result("screen", *SIZES, "--batch", "1", "--quick", *compared)
    assert set(found["models"]) == {
        f"peri, window {window}, qk-norm l2, sinks yes" for window in ("none", "2")
    }


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["simulate", "--attention", "sofmax"],
            "unknown attention 'sofmax': did you mean 'softmax'",
        ),
        (["train", "--ffn", "mpl"], "unknown ffn 'mpl': did you mean 'mlp'"),
        (["screen", "--compare", "attention=warn"], "did you mean 'warm'"),
        (["screen", "--compare", "positions=rotory"], "did you mean 'rotary'"),
        (["simulate", "--window", "0"], "window = 0: give a whole number"),
        (
            ["hjb-check", "--attention", "linear", "--softcap", "2"],
            "softcap = 2.0 has no meaning for attention 'linear'",
        ),
        (
            [
                "train",
                "--attention",
                "linear",
                "--temperature-start",
                "4",
                "--temperature-steps",
                "2",
            ],
            "'linear' has no temperature",
        ),
        (
            ["simulate", "--checkpoint", "x", "--attention", "softmax"],
            "--checkpoint brings its own attention",
        ),
    ],
)
def test_a_mistake_is_one_line(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*args)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert words in done.stderr
