"""`--architecture` and `--stream` as users type them: fresh weights of any shape, and the same
results with weights on demand.
"""

import json

import pytest
from click.testing import CliRunner

from ctrans.cli import main
from tests.helpers import old_command_note
from tests.interop.models import made

FEW = ["--tokens", "6", "--batch", "1", "--json", "-"]
COMMANDS = {"simulate": ["--no-reference"], "hjb-check": [], "control": [], "screen": ["--quick"]}


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="ctrans")


def of_attained(table):
    """Takes what training attains from the table of `control`: it trains, so to speak, all weights."""
    keep = [
        name not in ("work", "first-order condition") and not name.startswith(("left ", "work of"))
        for name in table["values"]["measure"]
    ]
    table["values"] = {
        column: [value for value, kept in zip(values, keep, strict=True) if kept]
        for column, values in table["values"].items()
    }
    del table["missing"]


def found(name, *args):
    result = run(name, *args, *COMMANDS[name])
    assert (result.exit_code, result.stderr) == (0, old_command_note(name)), result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A directory with nothing but a config.json of a Llama whose vocabulary has all bytes."""
    path = tmp_path_factory.mktemp("config")
    made("llama").config.save_pretrained(path)
    settings = json.loads((path / "config.json").read_text()) | {"vocab_size": 300}
    (path / "config.json").write_text(json.dumps(settings))
    return path


def figures(result):
    """All but what a run is called and how long it took."""
    text = json.dumps(
        {key: value for key, value in result.items() if key not in ("options", "environment")}
    )
    return json.loads(
        text,
        object_hook=lambda entry: {key: value for key, value in entry.items() if key != "seconds"},
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_looks_at_a_config_file(name, config):
    result = found(name, "--architecture", config / "config.json", *FEW)
    assert result["model"]["architecture"]["family"] == "llama"
    assert result["model"]["text"].startswith("bytes as token ids")
    assert result["options"]["dtype"] == "float32"
    assert result["options"]["context"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulate", "hjb-check", "control"])
def test_results_are_the_same_with_weights_on_demand(name, config):
    whole, streamed = (
        found(name, "--architecture", config, choice, *FEW)
        for choice in ("--no-stream", "--stream")
    )
    attained = (
        streamed.pop("attained", None),
        whole.pop("attained", None),
    )  # of `control`: it trains, so to speak, all weights
    if name == "control":
        for result in (streamed, whole):
            of_attained(result["measured"])
        (refused,), (kept,) = (each.values() for each in attained)
        (reasons,) = streamed.pop("missing").values()
        assert refused is None
        assert "loaded for one pass and cannot be trained" in reasons["left by all weights"]
        assert kept["loss"] > 0
        assert not whole.pop("missing")
    assert figures(streamed) == figures(whole)


@pytest.mark.slow
def test_screening_with_weights_on_demand_leaves_out_what_needs_all_of_them_and_nothing_else(
    config,
):
    whole, streamed = (
        next(iter(found("screen", "--architecture", config, choice, *FEW)["models"].values()))
        for choice in ("--no-stream", "--stream")
    )
    # a step that is wholly about all weights at once says so
    assert streamed["steps"]["backward"]["quantities"]["condition"] == "nan"
    assert whole["steps"]["updates"]["verdict"] == "moves"
    assert "needs all weights at once" in streamed["missing"]["updates"]
    assert streamed["steps"]["attention"]["quantities"] == whole["steps"]["attention"]["quantities"]
    assert "made on demand" in streamed["steps"]["backward"]["missing"]["gain up to the end"]
    for name in ("well-posedness", "forward"):
        assert figures(streamed["steps"][name]) == figures(whole["steps"][name])
    one, other = (each["steps"]["backward"]["result"] for each in (streamed, whole))
    assert one["sensitivity"]["sublayers"] == other["sensitivity"]["sublayers"]
    assert one["gradients"] == other["gradients"]


def test_seeded_models_are_the_same_with_weights_on_demand():
    size = ["--depth", "2", "--width", "16", "--heads", "2"]
    whole, streamed = (
        found("simulate", *size, choice, *FEW) for choice in ("--no-stream", "--stream")
    )
    assert figures(streamed) == figures(whole)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "size", [["--architecture"], ["--depth", "2", "--width", "16", "--heads", "2"]]
)
@pytest.mark.parametrize(
    ("choice", "decided"), [([], False), (["--stream"], True), (["--no-stream"], False)]
)
def test_json_says_whether_weights_were_made_on_demand(size, choice, decided, config):
    source = [*size, config] if size == ["--architecture"] else size
    assert found("simulate", *source, *choice, *FEW)["options"]["stream"] is decided


@pytest.mark.slow
def test_json_names_the_placements_that_are_screened(config):
    assert found("screen", "--architecture", config, *FEW)["options"]["placements"] == ["pre"]


@pytest.mark.slow
def test_depth_and_seed_can_be_chosen(config):
    one, other, third = (
        found("simulate", "--architecture", config, "--depth", depth, "--seed", seed, *FEW)
        for depth, seed in ((2, 0), (2, 1), (5, 0))
    )
    assert one["options"]["depth"] == 2
    assert one["placements"] != other["placements"]
    assert len(third["placements"]["pre"]["times"]) == 11


def test_without_a_reference_there_are_no_distances(config):
    reading = found("simulate", "--architecture", config, *FEW)["placements"]["pre"]
    assert reading["reference"] is None
    assert set(reading["distance"]) == {None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["simulate", "--architecture", "llama-7"],
            "did you mean 'llama-70b'|did you mean 'llama-7b'",
        ),
        (
            ["simulate", "--architecture", "gpt2", "--placement", "peri"],
            "--architecture brings its own placements",
        ),
        (
            ["simulate", "--architecture", "gpt2", "--model", "x"],
            (
                "2 models are given, --model 'x', --architecture 'gpt2', but this command takes"
                " one: choose one"
            ),
        ),
        (
            ["screen", "--architecture", "gpt2", "--compare", "dt=1,2"],
            "--architecture brings its own architecture",
        ),
        (["screen", "--architecture", "gpt2", "--depth", "0"], "blocks = 0"),
        (["simulate", "--checkpoint", "x", "--stream"], "leave out --stream"),
        (
            ["simulate", "--architecture", "gpt2", "--architecture", "gpt2"],
            "'gpt2' is named twice",
        ),
        (["control", "--architecture", ""], "--architecture '' names nothing"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert any(word in result.stderr for word in words.split("|"))


def test_a_model_of_images_without_images_is_refused_before_it_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "ctrans.cli.foreign_models.from_architecture", None
    )  # which passes an image of 224 by 224
    config = {
        "model_type": "deit",
        "architectures": ["DeiTForImageClassification"],
        "hidden_size": 32,
        "num_hidden_layers": 1,
    }
    config |= {"num_attention_heads": 2, "intermediate_size": 64, "patch_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("simulate", "--architecture", tmp_path / "config.json", "--batch", 1)
    assert result.exit_code == 2
    assert "reads no text: give --images PATH" in result.output
