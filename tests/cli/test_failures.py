"""An error that nobody expected ends a command with one line, and its traceback is never lost."""

import errno
import io
import os
import re

import pytest

from ctrans.cli import main
from ctrans.cli.failures import SHOWN, UNEXPECTED
from ctrans.cli.plugins import import_named
from ctrans.model.gpt import GPT
from tests.cli.test_commands import run

SMALL = ("--depth", 1, "--width", 16, "--heads", 2, "--context", 16, "--batch", 1)


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """Where tracebacks go."""
    monkeypatch.delenv(SHOWN, raising=False)
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def faulty(monkeypatch):
    monkeypatch.setattr(GPT, "embed", lambda *given: {}["a \033[2J fault\nof two lines"])


@pytest.mark.parametrize("wanted", [(), ("--json", "-")])
def test_a_fault_of_ours_is_a_line_with_a_code_of_its_own_and_keeps_its_traceback(
    wanted, faulty, kept
):
    result = run("simulate", *SMALL, *wanted)
    assert (result.exit_code, result.stdout) == (UNEXPECTED, "")
    said = re.fullmatch(
        r"ctrans: ctrans did not expect this error, please report it: KeyError: .*; the traceback"
        r" is in (.*) \(.*\)\n",
        result.stderr,
    )
    assert said, result.stderr
    assert "\033" not in result.stderr
    (path,) = kept.iterdir()
    assert said[1] == str(path)
    assert "Traceback (most recent call last)" in path.read_text()
    assert f'File "{__file__}"' in path.read_text()


@pytest.mark.parametrize("way", ["asked for", "no place"])
def test_a_traceback_is_printed_if_it_is_asked_for_or_no_file_can_have_it(
    way, faulty, kept, monkeypatch
):
    if way == "asked for":
        monkeypatch.setenv(SHOWN, "1")
    else:
        monkeypatch.setattr("tempfile.tempdir", str(kept / "none"))
    result = run("simulate", *SMALL)
    first, *_, last = result.stderr.splitlines()
    assert result.exit_code == UNEXPECTED
    assert first == "Traceback (most recent call last):"
    assert last.endswith("the traceback is above")
    assert not list(kept.iterdir())


@pytest.mark.parametrize("error", ["KeyError", "OSError", "AssertionError"])
def test_an_error_of_a_plugin_in_a_command_names_its_file_and_line(
    error, kept, tmp_path, monkeypatch
):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"def embed(*given):\n    print('loud')\n    raise {error}('theirs')\n")
    monkeypatch.setattr(GPT, "embed", import_named(str(plugin)).embed)
    result = run("simulate", *SMALL, "--json", "-")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"ctrans: {plugin}, line 3, failed: {error}: " in result.stderr
    assert len(list(kept.iterdir())) == 1


def test_the_traceback_of_a_plugin_that_cannot_be_imported_is_printed_if_it_is_asked_for(
    tmp_path, monkeypatch
):
    (tmp_path / "plugin.py").write_text("def deep():\n    return 1 / 0\n\ndeep()\n")
    assert run("--plugin", tmp_path / "plugin.py", "simulate", *SMALL).stderr.count("\n") == 1
    monkeypatch.setenv(SHOWN, "1")
    assert "in deep" in run("--plugin", tmp_path / "plugin.py", "simulate", *SMALL).stderr


@pytest.mark.parametrize(
    "args", [("--json", "\ud800name"), ("--html", "\ud800name"), ("--json", "a\0b"), ("a\0b",)]
)
def test_a_path_that_no_system_holds_is_an_error_of_the_user(args):
    result = run("simulate", *(SMALL if args[0].startswith("--") else ()), *args)
    assert result.exit_code == 2, result.stderr
    assert result.stderr.startswith("ctrans: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [("simulate", *SMALL, "--no-reference"), ("--help",)])
def test_a_full_stdout_is_named(args, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")

    class Full(io.StringIO):
        def write(self, text):
            raise full

    result = io.StringIO()
    monkeypatch.setattr("sys.stdout", Full())
    monkeypatch.setattr("sys.stderr", result)
    with pytest.raises(SystemExit) as ended:
        main([*map(str, args)])
    assert ended.value.code == 2
    assert "cannot write to standard output: No space left on device" in result.getvalue()


def test_a_backend_that_matplotlib_does_not_know_does_not_matter(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "nope")
    assert run("watch", "--help").exit_code == 0
    assert "MPLBACKEND" not in os.environ, "matplotlib reads it when it is imported"
