"""Commands in strange environments, and commands that signals end: what they say, how they exit,
and what is left of a training.

Each is a process of its own, as a user, a pipe or a scheduler begins it.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from ctrans.cli.failures import UNEXPECTED
from ctrans.model.sums import damage
from ctrans.training.run_directory import RunDirectory

SMALL = ("--depth", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "1")
COMMANDS = {
    "simulate": ("simulate", *SMALL),
    "json": ("simulate", *SMALL, "--json", "-"),
    "train": ("train", *SMALL, "--iterations", "3", "--monitor", "--every", "1"),
    "help": ("--help",),
    "wrong": ("simulate", "--width", "-1"),
}
WRONG = {"wrong": 2}
"""Commands that are refused."""
SECONDS = 300
"""After so many seconds a process hangs."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNALS, REPEATED, GAPS = 200, 0.4, (0.0, 0.001, 0.02, 0.2)
"""How many signals are the whole; the share of them that another one follows, and after how many
seconds.
"""


@dataclasses.dataclass(frozen=True)
class Environment:
    """The redirections of a shell, variables (None: unset), what runs before, and the exit codes by
    command, or for all of them.
    """

    redirected: str = ""
    variables: dict[str, str | None] = dataclasses.field(default_factory=dict)
    before: str = ":"
    codes: dict[str, int] = dataclasses.field(default_factory=dict)


ENVIRONMENTS = {
    "no HOME": Environment(variables={"HOME": None}),
    "a HOME that is not there": Environment(variables={"HOME": "/nowhere"}),
    "no variable at all": Environment(variables=dict.fromkeys(os.environ)),
    "stdin closed": Environment("<&-"),
    "stdout closed": Environment(">&-", codes={"json": 2, "help": 2}),
    "stderr closed": Environment("2>&-"),
    "all closed": Environment("<&- >&- 2>&-", codes={"json": 2, "help": 2}),
    "stdout full": Environment(">/dev/full", codes={"simulate": 2, "json": 2, "help": 2}),
    "stderr full": Environment("2>/dev/full"),
    "both full": Environment(">/dev/full 2>&1", codes={"simulate": 2, "json": 2, "help": 2}),
    "a reader who leaves": Environment("| true", codes={"simulate": 141, "json": 141, "help": 141}),
    "locale C without UTF-8": Environment(
        variables={
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONIOENCODING": "ascii",
        }
    ),
    "no TERM": Environment(variables={"TERM": None}),
    "a dumb terminal": Environment(variables={"TERM": "dumb", "FORCE_COLOR": "1"}),
    "no column": Environment(variables={"COLUMNS": "0"}),
    "a column": Environment(variables={"COLUMNS": "1"}),
    "100,000 columns": Environment(variables={"COLUMNS": "100000"}),
    "no temporary directory": Environment(variables={"TMPDIR": "/nowhere"}),
    "24 files": Environment(before="ulimit -n 24"),
    "warnings are errors": Environment(variables={"PYTHONWARNINGS": "error"}),
    "no asserts": Environment(variables={"PYTHONOPTIMIZE": "2"}),
    "a directory that is gone": Environment(
        before='rmdir "$PWD"', codes={"simulate": 2, "json": 2, "train": 2}
    ),
    "a directory that cannot be written": Environment(
        before="cd /proc", codes={"simulate": 2, "train": 2}
    ),
}
PRINTS = {"simulate", "train", "help"}


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended: its exit code as a shell says it, and what it wrote."""

    code: int
    out: str
    error: str

    @property
    def faults(self):
        """In words what no process may do."""
        hangs = [f"it hangs after {SECONDS} s"] if self.code == 128 + signal.SIGKILL else []
        traced = (
            ["a traceback"]
            if "Traceback" in self.error or "Exception ignored" in self.error
            else []
        )
        return (
            hangs
            + traced
            + (["an error that ctrans did not expect"] if self.code == UNEXPECTED else [])
        )


def begun(args, place, environment=Environment()):
    """The process of a command in that directory and environment, whose exit code the file `code`
    beside it gets.
    """
    place.mkdir(parents=True)
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **environment.variables,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = f'{environment.before}; "$@" {environment.redirected}; echo ${{PIPESTATUS[0]}} > "$CODE"'
    plain = environment == Environment()
    command = [sys.executable, "-m", "ctrans", *args]
    return subprocess.Popen(
        command if plain else ["/bin/bash", "-c", run, "bash", *command],
        cwd=place,
        env={name: value for name, value in variables.items() if value is not None}
        | {"CODE": f"{place}.code"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def ended(process, place):
    """How it ended; after `SECONDS` it is killed."""
    try:
        out, error = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, error = process.communicate()
    told = Path(f"{place}.code")
    code = (
        process.returncode if process.returncode < 0 or not told.exists() else int(told.read_text())
    )
    return End(
        128 - code if code < 0 else code,
        out.decode(errors="replace"),
        error.decode(errors="replace"),
    )


def in_environment(name, command, place):
    """What is wrong with how a command ends in an environment, in words."""
    environment = ENVIRONMENTS[name]
    end = ended(begun(COMMANDS[command], place, environment), place)
    expected = environment.codes.get(command, WRONG.get(command, 0))
    faults = list(end.faults)
    if end.code != expected:
        faults.append(f"exit code {end.code} instead of {expected}")
    if ">" not in environment.redirected:
        is_read = "|" not in environment.redirected
        if (command in PRINTS and expected == 0 and is_read) and not end.out.strip():
            faults.append("nothing printed")
        if command == "json" and expected == 0 and is_read:
            json.loads(end.out)
        if expected == 2 and not (end.error.startswith("ctrans: ") and end.error.count("\n") == 1):
            faults.append("no line that says why")
    return [f"{command}, {name}: {fault}; {end.error[-300:]!r}" for fault in faults]


def signalled(place, draws):
    """What is wrong with how a training ends by a signal or two at a random moment, in words, and
    whether the first one ended it.
    """
    process = begun(
        ("train", *SMALL, "--iterations", "200", "--save-every", "5", "--out", "run"), place
    )
    first, then = draws.choice(ENDING), draws.choice(ENDING) if draws.random() < REPEATED else None
    after = draws.choice((draws.uniform(0, 1), draws.uniform(0, 6), draws.uniform(0, 12)))
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.send_signal(first)
        if then is not None:
            time.sleep(draws.choice(GAPS))
            process.send_signal(then)
    end, run = ended(process, place), RunDirectory(place / "run")
    allowed = {0, *(128 + each for each in (first, then) if each is not None)}
    faults = [
        *end.faults,
        *([] if end.code in allowed else [f"exit code {end.code} is none of {allowed}"]),
    ]
    if end.error.count("ctrans: ") > 1:
        faults.append("more than a line")
    if run.exists and damage(run.last) is not None:
        faults.append(damage(run.last))
    elif run.exists and end.code != 0:
        more = place.parent / f"{place.name}-resumed"
        again = ended(
            begun(("train", "--resume", "--iterations", "200", "--out", str(place / "run")), more),
            more,
        )
        faults += [] if again.code == 0 else [f"not resumed: {again.code}, {again.error[-300:]}"]
    words = f"train, {first.name}, {then and then.name} after {after:.2f} s: exit code {end.code}"
    return [f"{words}: {fault}; {end.error[-300:]!r}" for fault in faults], end.code != 0


def lived(place, part):
    """What a part of the campaign did, by its kinds, and what it found wrong in words."""
    faults, done, draws = [], Counter(), part.random
    for number, (name, command) in enumerate(
        part.among([(name, command) for name in ENVIRONMENTS for command in COMMANDS])
    ):
        faults += in_environment(name, command, place / f"environment-{number}")
        shutil.rmtree(place / f"environment-{number}", ignore_errors=True)
        done["commands in strange environments"] += 1
    for number in range(part.of(SIGNALS)):
        found, by_signal = signalled(place / f"signal-{number}", draws)
        faults += found
        done[
            "trainings that a signal ended" if by_signal else "trainings that a signal met too late"
        ] += 1
    return done, faults
