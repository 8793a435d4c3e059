"""A signal ends a command with a line, also inside one long operation, and is given back when the
command ends.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from ctrans.cli.signals import ENDING
from tests.cli.test_commands import run

LONG = """
import os, signal, threading, torch
def long():
    x = torch.zeros(2048, 2048)
    print("begun", flush=True)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.{name})).start()
    torch.linalg.multi_dot([x] * 3000)
"""
SHORT = """
import os, signal, sys, torch
import ctrans.cli.signals as signals
from ctrans.training.signals import stopping
signals.PATIENCE = 0.05
x = torch.zeros(2048, 2048)
with signals.ending_by_signals():
    if "fork" in sys.argv:
        if os.fork() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        torch.linalg.multi_dot([x] * 8)
    else:
        with stopping() as wish:
            os.kill(os.getpid(), signal.SIGTERM)
            torch.linalg.multi_dot([x] * 8)
        assert wish.number == signal.SIGTERM
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_one_long_operation_with_a_line(name, tmp_path):
    (tmp_path / "model.py").write_text(LONG.format(name=name))
    command = [
        sys.executable,
        "-m",
        "ctrans",
        "diagnose",
        "--python",
        f"{tmp_path / 'model.py'}:long",
        "--json",
        str(tmp_path / "j"),
    ]
    heard = partial(
        signal.signal, getattr(signal, name), signal.SIG_DFL
    )  # children of nohup, or of a shell's job, ignore some
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heard
    )
    assert process.stderr.readline() == "begun\n"
    started = time.monotonic()
    _, error = process.communicate(timeout=100)
    assert time.monotonic() - started < 20
    number = getattr(signal, name)
    assert (process.returncode, error) == (
        128 + number,
        f"ctrans: {'interrupted' if name == 'SIGINT' else f'ended by {name}'}\n",
    )
    assert [
        path.name
        for path in tmp_path.iterdir()
        if path.suffix != ".py" and path.name != "__pycache__"
    ] == []


HIDES = """
import os, signal, time
def model():
    try:
        os.kill(os.getpid(), signal.{name})
        time.sleep(10)
    except BaseException:
        {then}
"""


@pytest.mark.parametrize("then", ["raise RuntimeError('native code failed') from None", "exit(5)"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_whose_error_a_library_replaces_ends_the_command_as_the_signal_does(
    name, then, tmp_path
):
    (tmp_path / "model.py").write_text(HIDES.format(name=name, then=then))
    result = run("diagnose", "--python", f"{tmp_path / 'model.py'}:model", "--json", "-")
    words = "interrupted" if name == "SIGINT" else f"ended by {name}"
    assert (result.exit_code, result.stderr) == (
        128 + getattr(signal, name),
        f"ctrans: {words}\n",
    )
    missing = run("diagnose", "--python", "nowhere.py:model", "--json", "-")
    assert missing.exit_code == 2  # the next command knows nothing of it


@pytest.mark.parametrize("of", ["fork", "training"])
def test_a_signal_of_a_fork_and_the_first_of_a_training_do_not_end_a_long_operation(of, tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "short.py"), of],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "goes on\n"), done.stderr


def test_a_signal_in_an_import_leaves_no_half_module_to_go_on_with(tmp_path):
    (tmp_path / "half.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\nexcept BaseException:"
        " pass\n"
    )
    code = (
        "from ctrans.cli.signals import ending_by_signals\nwith ending_by_signals():\n    import"
        " half\nprint('goes on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        128 + signal.SIGTERM,
        "",
        "ctrans: ended by SIGTERM\n",
    )


def test_signals_are_given_back():
    def state():
        woken = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(woken)
        return woken, [signal.getsignal(number) for number in ENDING]

    # a thread that ends may take its time, also one of an earlier test: held things may become
    # fewer
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    run("convergence", "--help")
    before, most = state(), held()
    for _ in range(5):
        assert run("convergence", "--help").exit_code == 0
    for _ in range(100):
        if state() == before and all(now <= then for now, then in zip(held(), most, strict=True)):
            return
        time.sleep(0.05)
    raise AssertionError((state(), before, held(), most))
