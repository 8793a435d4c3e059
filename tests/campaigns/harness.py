"""What every campaign has in common: requests as users type them, what is wrong with an answer, and
a campaign's parts.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import os
import random
import re
import resource
import select
import signal
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import hypothesis
from click.testing import CliRunner

from ctrans.base.printable import UNSAFE
from ctrans.cli import COMMANDS, main
from ctrans.cli.failures import UNEXPECTED

SECONDS, BYTES = 60, 2 << 30
"""No refusal takes longer, or more memory."""
IMPORTS = 600 << 20
"""What a process holds that has only imported the libraries. It counts as part of BYTES."""
GUARD = 6 << 30
"""A request in a process of its own gets no more address space than this, so that a fault harms
nobody.
"""
REFUSED = (1, 2)
"""How a request ends that makes no sense, or a computation that failed."""


def draw_all(count, seed, strategy, check):
    """`check` with so many draws of the strategy, the same ones for the same seed."""
    if count == 0:
        return

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(drawn=strategy)
    def each(drawn):
        check(drawn)

    each()


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the parts in which a campaign is carried out, so that one that is stopped goes on
    where it was.
    """

    seed: int
    share: float = 1.0
    number: int = 0
    parts: int = 1

    @property
    def drawn(self):
        """A seed of its own."""
        return 1000 * self.seed + self.number

    @property
    def random(self):
        return random.Random(self.drawn)

    def of(self, whole):
        """How many of so many this part has; the parts add up to the share of the whole."""
        wanted = round(whole * self.share)
        return wanted * (self.number + 1) // self.parts - wanted * self.number // self.parts

    def among(self, things):
        """Those of a list that this part has: each is in one part, a share of them in any."""
        things = list(things)
        chosen = random.Random(self.seed).sample(
            things, min(len(things), max(1, round(len(things) * self.share)))
        )
        return chosen[self.number :: self.parts]


class Runs:
    """What leaves a mark when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@dataclasses.dataclass
class Answer:
    """How a request ended: exit code, output, seconds, most bytes held, and in words what no
    request may do.
    """

    args: list
    code: int
    out: str
    error: str
    seconds: float
    held: int
    faults: list

    @property
    def said(self):
        return (
            f"{' '.join(map(repr, self.args))[:600]} -> {self.code}, {self.seconds:.1f} s,"
            f" {self.error[-600:]!r}: {self.faults}"
        )


def memory(name):
    """This process's VmRSS, what it holds, or VmHWM, the most that it held."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def reset_memory():
    """What this process holds now; VmHWM begins anew."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return memory("VmRSS")


def ask(args, *, refused=None):
    """The answer to a request; `refused` is whether it has to be refused, None where it may be
    either.
    """
    before, started = reset_memory(), time.monotonic()
    result = CliRunner().invoke(main, args, prog_name="ctrans", input="y\n" * 9)
    seconds, held = time.monotonic() - started, IMPORTS + memory("VmHWM") - before
    faults = []
    if result.exit_code == UNEXPECTED:
        kept = re.search(r"the traceback is in (\S+)", result.stderr)
        faults.append(
            f"traceback: {Path(kept[1]).read_text()[-1500:] if kept else result.stderr[-1500:]}"
        )
    if result.exit_code not in (0, *REFUSED):
        faults.append(f"exit code {result.exit_code}")
    if refused and result.exit_code == 0:
        faults.append("not refused")
    if result.exit_code == 2 and (
        result.stderr.count("\n") != 1 or not result.stderr.startswith("ctrans: ")
    ):
        faults.append("more than a line")
    if "Traceback" in result.output or "[y/N]" in result.output:
        faults.append("a traceback or a question in what is printed")
    if UNSAFE.search(result.output):
        faults.append(f"control characters in what is printed: {UNSAFE.findall(result.output)[:9]}")
    if seconds > SECONDS:
        faults.append(f"{seconds:.0f} seconds")
    if held > BYTES:
        faults.append(f"{held / 1e9:.1f} GB")
    return Answer(list(args), result.exit_code, result.stdout, result.stderr, seconds, held, faults)


@functools.cache
def imported():
    """What requests import, so that their copies need not."""
    for name in COMMANDS:
        importlib.import_module(f"ctrans.cli.{name.replace('-', '_')}")
    for name in (
        "ctrans.report.picture",
        "torch._dynamo",
        "transformers.models.auto.modeling_auto",
    ):
        importlib.import_module(name)
    gc.freeze()  # else the collector of each copy touches, and so copies, all that was imported


def apart(acts, *, seconds=SECONDS + 5, space=GUARD):
    """For each of the functions its result, which JSON can hold, and how its process ended in words
    where there is none; and what was printed past Python.

    They run one after another in a copy of this process, and those after one that hangs or crashes
    in another. This process never differentiates, as its copies do.
    """
    imported()
    begun = 0
    while begun < len(acts):
        with tempfile.TemporaryFile() as printed:
            process, lines = _copy(acts[begun:], printed, space)
            before = bytearray()
            while begun < len(acts) and (line := _line(lines, before, seconds)) is not None:
                yield json.loads(line), None, _rest(printed)
                begun += 1
            hangs = not select.select([lines], [], [], 0)[0]
            os.kill(process, signal.SIGKILL)  # it is no other's yet: nobody has waited for it
            _, status = os.waitpid(process, 0)
            os.close(lines)
            if begun < len(acts):
                how = (
                    f"no answer after {seconds} seconds"
                    if hangs
                    else f"its process ended with {status}"
                )
                yield None, how, _rest(printed)
                begun += 1


def _copy(acts, printed, space):
    """The number of a copy of this process that runs them, and where their results come line by
    line.
    """
    lines, to = os.pipe()
    with warnings.catch_warnings(action="ignore"):
        process = os.fork()
    if process:
        os.close(to)
        return process, lines
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.dup2(printed.fileno(), 1), os.dup2(printed.fileno(), 2)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * resource.getpagesize() + space, resource.RLIM_INFINITY)
        )
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        file = open(to, "wb", 0)  # noqa: SIM115  # its end is the copy's end
        for act in acts:
            file.write(json.dumps(act()).encode() + b"\n")
            gc.collect()
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(3)


def _line(lines, before, seconds):
    """A whole line, None where none comes in time; `before` is what was read already."""
    until = time.monotonic() + seconds
    while b"\n" not in before:
        read = select.select([lines], [], [], max(0, until - time.monotonic()))[0] and os.read(
            lines, 1 << 16
        )
        if not read:
            return None
        before += read
    line, _, rest = before.partition(b"\n")
    before[:] = rest
    return bytes(line)


def _rest(printed):
    """What was printed since it was last looked at; the place is that of the copy too, which goes
    on after it.
    """
    end, said = os.fstat(printed.fileno()).st_size, b""
    if end:
        said = os.pread(printed.fileno(), 1 << 20, 0)
        os.ftruncate(printed.fileno(), 0), os.lseek(printed.fileno(), 0, os.SEEK_SET)
    return said.decode(errors="replace")


def ask_apart(requests, *, refused=None):
    """The answers to these requests as `ask` gives them, in copies of this process: one may hang,
    crash or take all memory.
    """
    acts = [functools.partial(_asked, args, refused) for args in requests]
    for args, (answer, how, said) in zip(requests, apart(acts), strict=True):
        answer = (
            Answer(list(args), -1, "", said[-900:], float(SECONDS), 0, [how])
            if answer is None
            else Answer(**answer)
        )
        if UNSAFE.search(said.replace("\ufffd", "")):
            answer.faults.append(f"control characters past Python: {said[:300]!r}")
        yield answer


def _asked(args, refused):
    return dataclasses.asdict(ask(args, refused=refused))
