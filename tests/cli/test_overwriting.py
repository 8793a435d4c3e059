"""No command replaces its source, or a file that ctrans did not write, without --overwrite."""

import errno
import hashlib
import io
import json
import os
import shutil
import stat
import sys

import click
import pytest
import torch
from click.testing import CliRunner
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ctrans.cli import main, plugins, request
from ctrans.cli.click_options import GroupedCommand, parameters_of
from ctrans.cli.diagnose import DiagnoseRequest
from ctrans.cli.request import request_of
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.report.files import write_atomic
from ctrans.report.ownership import check_replaceable, check_result
from ctrans.study import database
from ctrans.training import run_directory
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import check_free
from solvers import ConfigError

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


@pytest.fixture
def trained_run(tmp_path):
    """A run with one checkpoint, whose state nothing reads here."""
    store = RunDirectory(tmp_path / "run")
    with store.saving(1, best=1, good=0) as directory:
        saved(directory, 0)
        (directory / "train.json").write_text("{}")
        (directory / "optimiser.safetensors").write_bytes(b"")
    return store.directory


QUICK = ["generate", "--tokens", "1", "--samples", "1"]
"""The rest of a command that takes a model, whose checks come first."""


@pytest.mark.parametrize(
    "place", ["last/mine.json", "checkpoints/base/mine.json", "checkpoints/step-00000001/mine.json"]
)
def test_no_result_is_written_among_the_checkpoints_of_a_run(place, trained_run):
    before = digests(trained_run)
    result = run(*QUICK, "--checkpoint", trained_run, "--json", trained_run / place, "--overwrite")
    assert (result.exit_code, "among the checkpoints" in result.stderr) == (2, True), result.output
    assert digests(trained_run) == before
    with pytest.raises(ConfigError, match="among the checkpoints"):
        check_result(trained_run / "last", "diagnose", ["diagnose.png"], overwrite=True)


@pytest.mark.parametrize("form", ["hf", "nanogpt"])
@pytest.mark.parametrize("out", ["run", "run/best", "run/checkpoints/step-00000001", "alone"])
def test_an_export_with_overwrite_never_replaces_its_source_or_enters_a_run(
    form, out, trained_run, tmp_path
):
    saved(tmp_path / "alone", 1)
    source = tmp_path / "alone" if out == "alone" else trained_run
    before = digests(tmp_path)
    result = run(
        "export", "--checkpoint", source, "--out", tmp_path / out, "--to", form, "--overwrite"
    )
    assert result.exit_code == 2, result.output
    assert digests(tmp_path) == before


def test_an_export_into_another_run_is_refused(trained_run, tmp_path):
    saved(tmp_path / "alone", 1)
    result = run("export", "--checkpoint", tmp_path / "alone", "--out", trained_run)
    assert (result.exit_code, "has a training run" in result.stderr) == (2, True), result.output


def test_a_run_does_not_begin_where_a_model_is_read_in_its_place(tmp_path):
    saved(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_free(RunDirectory(tmp_path))


@pytest.mark.parametrize(
    ("beside_a_run", "overwrite"), [(False, []), (False, ["--overwrite"]), (True, ["--overwrite"])]
)
@pytest.mark.parametrize("file", ["config.json", "ckpt.pt", ".metadata"])
def test_a_run_is_not_written_beside_a_model(file, beside_a_run, overwrite, tmp_path, request):
    out = tmp_path / "out"
    if beside_a_run:
        shutil.copytree(request.getfixturevalue("trained_run"), out, symlinks=True)
    out.mkdir(exist_ok=True)
    (out / file).write_text("{}")
    before = digests(out)
    options = ["--iterations", "2", "--batch", "2", "--file", __file__, "--out", out, *overwrite]
    result = run("train", *SMALL, *options)
    assert result.exit_code == 2, result.output
    assert f"holds a model, {file}, which commands would read in place of the run" in result.stderr
    after = digests(out)
    after.pop(".lock", None)
    before.pop(".lock", None)
    assert after == before


def test_a_run_is_not_overwritten_by_one_that_starts_from_it(trained_run, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(trained_run)
    for origin in (trained_run, link, trained_run / "last"):
        result = run("train", "--from", origin, "--out", trained_run, "--overwrite")
        assert (result.exit_code, "--from" in result.stderr) == (2, True), result.output


def test_inputs_stay_also_with_overwrite_and_own_results_beside_them_do_not(tmp_path):
    text, model = tmp_path / "t.txt", tmp_path / "model"
    saved(model, 0)
    text.write_text("a text")
    (tmp_path / "hard.txt").hardlink_to(text)
    (tmp_path / "link.txt").symlink_to(text)
    (tmp_path / "folder").symlink_to(model)
    own = '{"command": "watch", "options": {'
    (model / "watch.json").write_text(own)
    for path in (
        text,
        tmp_path / "hard.txt",
        tmp_path / "link.txt",
        model / "config.json",
        tmp_path / "folder" / "config.json",
    ):
        with pytest.raises(ConfigError, match="reads it"):
            check_replaceable(path, overwrite=True, inputs=[text, model])
    check_replaceable(model / "watch.json", overwrite=False, inputs=[text, model])
    check_replaceable(tmp_path / "new.json", overwrite=False, inputs=[text, model])
    with pytest.raises(ConfigError, match="reads it"):
        check_replaceable(model / "watch.json", overwrite=True, inputs=[model / "watch.json"])


def test_every_option_that_names_a_path_is_an_input_unless_it_is_of_the_output(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(request, "FILES", set())
    for name in ("plain.txt", "example.py", "baseline.json", "model"):
        (tmp_path / name).write_text("")
    seen = []
    command = GroupedCommand(
        "diagnose",
        params=parameters_of(DiagnoseRequest),
        callback=lambda **_: seen.append(request_of(DiagnoseRequest, click.get_current_context())),
    )
    written = ["--json", "a.json", "--html", "a.html", "--out", "out", "--sarif", "a.sarif"]
    command.main(
        [
            str(tmp_path / "model"),
            *("--file", str(tmp_path / "plain.txt")),
            *("--baseline", str(tmp_path / "baseline.json")),
            *("--example", f"{tmp_path / 'example.py'}:batch"),
            *written,
        ],
        standalone_mode=False,
    )
    assert sorted(path.name for path in seen[0].inputs) == [
        "baseline.json",
        "example.py",
        "model",
        "plain.txt",
    ]


def test_a_replaced_result_keeps_its_mode_and_a_read_only_one_stays(tmp_path):
    result = tmp_path / "result.json"
    result.write_text('{"command": "watch", "options": {')
    result.chmod(0o600)
    check_replaceable(result, overwrite=False)
    write_atomic(result, b"new")
    assert stat.S_IMODE(result.stat().st_mode) == 0o600
    result.write_text('{"command": "watch", "options": {')
    result.chmod(0o444)
    with pytest.raises(ConfigError, match="is read-only: choose another place"):
        check_replaceable(result, overwrite=False)
    check_replaceable(result, overwrite=True)


@pytest.mark.parametrize("name", [run_directory.LOCK, database.LOCK])
def test_a_lock_is_never_replaced(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="is the lock of a run or a study"):
        check_replaceable(tmp_path / name, overwrite=True)


STUDY = (
    "learning_rates = [1e-3]\nseeds = [0]\n[base]\ndepth = 1\nwidth = 8\nheads = 1\ncontext = 8\n"
)


MODULE = """
import part_read
from torch import nn

def build():
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(256, 8), encoder, nn.Linear(8, 256))
"""


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("book.txt", ["study", "s.toml", "--dry-run", "--json", "book.txt"]),
        (
            "mod_read.py",
            ["simulate", "--python", "mod_read:build", "--context", "8", "--json", "mod_read.py"],
        ),
        ("mod_read.py", ["--plugin", "mod_read", *RESULTS["simulate"], "--json", "mod_read.py"]),
        ("part_read.py", ["--plugin", "mod_read", *RESULTS["simulate"], "--json", "part_read.py"]),
    ],
)
def test_inputs_that_no_option_names_by_their_path_stay(name, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "LOADED", {})
    (tmp_path / "book.txt").write_text("a text\n" * 99)
    (tmp_path / "s.toml").write_text('file = "book.txt"\n' + STUDY)
    (tmp_path / "mod_read.py").write_text(MODULE)
    (tmp_path / "part_read.py").write_text("x = 1\n")
    before = (tmp_path / name).read_bytes()
    for module in ("mod_read", "part_read"):
        sys.modules.pop(module, None)
    result = run(*args, "--overwrite")
    assert (result.exit_code, "this command reads it" in result.stderr) == (2, True), result.output
    assert (tmp_path / name).read_bytes() == before


TO = ["--out", "out"]
ONE_PLACE = {
    "two options": ["diagnose", *SMALL, "--sarif", "x", "--junit", "x", "--out", "out"],
    "json and html": ["simulate", *SMALL, "--json", "x", "--html", "out/../x", "--out", "out"],
    "a page in place of the JSON": ["simulate", *SMALL, "--html", "out/simulate.json", *TO],
    "a picture": ["simulate", *SMALL, "--json", "out/simulate.png", "--out", "out"],
    "the directory": ["simulate", *SMALL, "--json", "out", "--out", "out"],
    "around the directory": ["simulate", *SMALL, "--json", "out", "--out", "out/x"],
    "a log": ["train", *SMALL, "--json", "out/log.jsonl", "--out", "out"],
    "a link": ["train", *SMALL, "--json", "out/last", "--out", "out"],
    "checkpoints": ["train", *SMALL, "--html", "out/checkpoints/x", "--out", "out"],
    "a store": ["study", "kan-table-2", "--json", "out/study.sqlite", "--out", "out"],
    "a table": ["study", "kan-table-2", "--export", "csv", "--json", "out/runs.csv", *TO],
    "weights": ["export", "--checkpoint", "model", "--json", "out/model.safetensors", *TO],
    "a treated copy": ["diagnose", "model", "--treat", "y", "--html", "y/x", "--out", "out"],
    "a treated copy as directory": ["diagnose", "model", "--treat", "out", "--out", "out"],
}


@pytest.mark.parametrize("case", ONE_PLACE)
def test_two_files_of_a_command_never_have_one_place(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "model", 0)
    result = run(*ONE_PLACE[case])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "choose" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is made"


def test_the_json_may_be_named_where_the_directory_has_it_anyway(tmp_path):
    result = run(*RESULTS["verify"], "--out", tmp_path, "--json", tmp_path / "verify.json")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("name", "own"),
    [("runs.csv", "key,case,seed,learning_rate,model\n"), ("outcomes.csv", "case,name,value\n")],
)
def test_tables_of_users_stay_also_beside_an_earlier_study(name, own, tmp_path):
    (tmp_path / name).write_text("name,value\nof mine,1\n")
    before = digests(tmp_path)
    asked = ["study", "kan-table-2", "--export", "csv", "--report", "--out", tmp_path]
    result = run(*asked)
    assert (result.exit_code, f"{name}' exists" in result.stderr) == (2, True), result.output
    assert digests(tmp_path) == before
    (tmp_path / "study.json").write_text('{"command": "study", "options": {')
    assert f"{name}' exists" in run(*asked).stderr
    (tmp_path / name).write_text(own)
    assert "there is no study.sqlite" in run(*asked).stderr, "an earlier table may be replaced"


def test_an_export_in_another_format_is_not_mixed_with_an_earlier_one(tmp_path):
    saved(tmp_path / "source", 0)
    asked = ["export", "--checkpoint", tmp_path / "source", "--out", tmp_path / "out"]
    assert run(*asked, "--to", "nanogpt").exit_code == 0
    before = digests(tmp_path)
    result = run(*asked)
    assert (result.exit_code, "ckpt.pt" in result.stderr) == (2, True), result.output
    assert digests(tmp_path) == before
    replaced = run(*asked, "--overwrite")
    assert (replaced.exit_code, "ckpt.pt of another format stays" in replaced.stdout) == (0, True)
    assert json.loads((tmp_path / "out" / "export.json").read_text())["files"] == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.json", " " * 5000 + "notes"),
        ("page.html", " " * 5000 + "notes"),
        ("notes.yaml", 'tool:\n  "name": "ctrans"\n'),
        ("notes.txt", "case,name,value\n1,2,3\n"),
        ("notes", '<testsuites name="ctrans">'),
    ],
)
def test_a_file_that_only_looks_like_one_of_ctrans_stays(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match="ctrans did not write it"):
        check_replaceable(path, overwrite=False)


@pytest.mark.parametrize("name", ["diagnose.json", "page.html", "runs.csv", "notes"])
def test_a_file_that_cannot_be_read_stays(name, tmp_path, monkeypatch):
    theirs = tmp_path / name
    theirs.write_text("precious")

    def refused(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("pathlib.Path.open", refused)  # as root reads every file
    with pytest.raises(ConfigError, match="ctrans did not write it"):
        check_replaceable(theirs, overwrite=False)
    with pytest.raises(ConfigError, match="exists"):
        check_result(tmp_path, "diagnose", [name], overwrite=False)
    check_replaceable(theirs, overwrite=True)


def test_a_picture_of_an_earlier_result_goes_with_it(tmp_path, monkeypatch):
    args = [*RESULTS["hjb-check"], "--out", tmp_path]
    assert run(*args).exit_code == 0
    picture = tmp_path / "hjb-check.png"
    assert picture.exists()

    monkeypatch.setattr("ctrans.cli.ending.pictures", lambda page: {})
    assert run(*args).exit_code == 0
    assert not picture.exists()


def picture(writer):
    figure = Figure()
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": writer})
    return buffer.getvalue()


OF_ANOTHER_PROGRAM = {
    "text": b"my own picture",
    "empty": b"",
    "matplotlib": picture("Matplotlib version 3.10.0, https://matplotlib.org/"),
}


@pytest.mark.parametrize(
    ("command", "name", "content"),
    [
        ("simulate", "spectra.png", "text"),
        ("simulate", "contributions.png", "empty"),
        ("hjb-check", "hjb-train.png", "matplotlib"),
    ],
)
def test_a_picture_of_a_user_beside_an_earlier_result_is_never_removed(
    command, name, content, tmp_path
):
    args = [*RESULTS[command], "--out", tmp_path]
    assert run(*args).exit_code == 0
    (tmp_path / name).write_bytes(OF_ANOTHER_PROGRAM[content])
    if content != "empty":
        refused = run(*args)
        assert (refused.exit_code, f"{name}' exists" in refused.stderr) == (2, True), refused.output
    assert run(*args, "--overwrite").exit_code == 0
    assert (tmp_path / name).read_bytes() == OF_ANOTHER_PROGRAM[content], "it was not drawn"


def test_a_picture_in_the_place_of_a_results_own_is_replaced_only_if_ctrans_wrote_it(tmp_path):
    args = [*RESULTS["simulate"], "--out", tmp_path]
    drawn = tmp_path / "simulate.png"
    for _ in range(2):
        assert run(*args).exit_code == 0
    drawn.write_text("mine")
    assert run(*args).exit_code == 2
    assert drawn.read_text() == "mine"
    drawn.write_bytes(OF_ANOTHER_PROGRAM["matplotlib"])
    assert run(*args).exit_code == 2
    assert drawn.read_bytes() == OF_ANOTHER_PROGRAM["matplotlib"]
    result = tmp_path / "simulate.json"
    of_version_03 = json.loads(result.read_text())
    del of_version_03["measured"]
    result.write_text(json.dumps(of_version_03))
    assert run(*args).exit_code == 0, "as of an earlier version of ctrans"
    assert b"Software\0ctrans" in drawn.read_bytes()
