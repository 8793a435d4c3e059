"""Warnings of other libraries and of users' code stand in no command's way: --verbose shows them."""

import subprocess
import sys
import warnings

import pytest

from ctrans.cli.other_warnings import other_warnings, settle_other_warnings

NOISY = """
import logging, threading, warnings
async def unawaited():
    pass
class FailsAtItsEnd:
    def __del__(self):
        raise ValueError("in the end of an object")
def fails():
    raise ValueError("in a thread")
def model():
    warnings.warn("a warning")
    logging.getLogger("another.library").warning("a line of a log")
    unawaited()
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    FailsAtItsEnd()
    logging.getLogger("ctrans.part").warning("a line of our own")
    return 3
"""
OTHERS = (
    "a warning",
    "a line of a log",
    "never awaited",
    "in a thread",
    "in the end of an object",
)


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [False, True])
def test_a_command_shows_warnings_of_others_with_verbose_only(verbose, tmp_path):
    (tmp_path / "model.py").write_text(NOISY)
    command = [sys.executable, "-m", "ctrans", "diagnose", "--json", "-"]
    command += ["--python", f"{tmp_path / 'model.py'}:model"]
    if verbose:
        command.append("--verbose")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "a line of our own" in done.stderr
    assert "returned int: return an nn.Module" in done.stderr.splitlines()[-1]
    assert [text in done.stderr for text in OTHERS] == [verbose] * len(OTHERS)
    if not verbose:
        assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("verbose", [False, True])
def test_a_warning_waits_until_it_is_known_whether_the_command_shows_it(verbose, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "warnoptions", [])
    monkeypatch.setattr(warnings, "showwarning", lambda message, *of: shown.append(str(message)))
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with other_warnings(is_own_process=False):
            warnings.warn("early", stacklevel=1)
            assert shown == []
            settle_other_warnings(verbose=verbose)
            warnings.warn("late", stacklevel=1)
        assert warnings.showwarning is before
    assert shown == (["early", "late"] if verbose else [])
