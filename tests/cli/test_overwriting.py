"""No command replaces its source, or a file that ctrans did not write, without --overwrite."""

import hashlib
import json

import pytest
import torch
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT

SMALL = ["--depth", "1", "--width", "8", "--heads", "2", "--context", "8"]
RESULTS = {
    "simulate": ["simulate", "--placement", "pre", "--no-reference", *SMALL],
    "hjb-check": ["hjb-check", "--placement", "peri", "--norm", "rmsnorm", *SMALL],
    "diagnose": ["diagnose", *SMALL],
    "verify": ["verify", "--only", "lemma-9", "--cases", "2"],
}
every_command = pytest.mark.parametrize("command", RESULTS)


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def digests(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


@every_command
@pytest.mark.parametrize("name", ["{}.json", "{}.png"])
def test_a_file_of_another_program_stays(command, name, tmp_path):
    theirs = tmp_path / name.format(command)
    theirs.write_text("the notes of a user")
    result = run(*RESULTS[command], "--out", tmp_path)
    assert result.exit_code == 2, result.output
    assert f"{str(theirs)!r} exists" in result.stderr
    assert "--overwrite" in result.stderr
    assert digests(tmp_path) == {theirs.name: hashlib.sha256(b"the notes of a user").hexdigest()}, (
        "nothing is written"
    )


def test_a_result_replaces_an_earlier_one_of_its_command_and_with_overwrite_any(tmp_path):
    for _ in range(2):
        assert run(*RESULTS["simulate"], "--out", tmp_path).exit_code == 0
    (tmp_path / "simulate.json").write_text("notes")
    assert run(*RESULTS["simulate"], "--out", tmp_path).exit_code == 2
    assert run(*RESULTS["simulate"], "--out", tmp_path, "--overwrite").exit_code == 0
    assert json.loads((tmp_path / "simulate.json").read_text())["command"] == "simulate"


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_files_named_by_options_are_held_to_the_same_rule(option, tmp_path):
    pytest.importorskip("jinja2")
    path = tmp_path / f"package{option.replace('--', '.')}"
    path.write_text('{"command": "build", "args": ["of another program"]}')
    before = digests(tmp_path)
    args = [*RESULTS["simulate"], option, path, "--out", tmp_path / "out"]
    assert run(*args).exit_code == 2
    assert digests(tmp_path) == before
    assert run(*args, "--overwrite").exit_code == 0
    assert run(*args).exit_code == 0, "an earlier result of ctrans may be replaced"


def saved(directory, seed):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(depth=1, width=8, heads=2, context=8, placement="pre"))
    save(model, directory)
    return model


@pytest.mark.parametrize("form", ["hf", "nanogpt"])
def test_an_export_onto_its_source_or_another_model_is_refused(form, tmp_path):
    source, other = tmp_path / "source", tmp_path / "other"
    saved(source, 0)
    saved(other, 1)
    if form == "nanogpt":
        (source / "ckpt.pt").write_bytes(b"another model")
        (other / "ckpt.pt").write_bytes(b"another model")
    before = digests(tmp_path)
    for out in (source, other):
        result = run("export", "--checkpoint", source, "--out", out, "--to", form)
        assert (result.exit_code, "exists" in result.stderr) == (2, True), result.output
    assert digests(tmp_path) == before
    fresh = tmp_path / "fresh"
    for _ in range(2):
        assert run("export", "--checkpoint", source, "--out", fresh, "--to", form).exit_code == 0
