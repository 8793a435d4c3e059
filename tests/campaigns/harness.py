"""What every campaign has in common: requests as users type them, in this process, and what is wrong with an answer."""

import dataclasses
import resource
import time
import traceback

import hypothesis
from click.testing import CliRunner

from ctrans.cli import main

SECONDS, BYTES = 60, 4 << 30
"""No refusal takes longer, or more memory."""
REFUSED = (1, 2)
"""How a request ends that makes no sense, or a computation that failed."""


def draw_all(count, seed, strategy, check):
    """`check` with so many draws of the strategy, the same ones for the same seed."""

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


class Runs:
    """What leaves a mark when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@dataclasses.dataclass
class Answer:
    """How a request ended: exit code, output, seconds, and in words what no request may do."""

    args: list
    code: int
    out: str
    error: str
    seconds: float
    faults: list

    @property
    def said(self):
        return (
            f"{' '.join(map(repr, self.args))[:600]} -> {self.code}, {self.seconds:.1f} s, {self.error[-600:]!r}: {self.faults}"
        )


def ask(args, *, refused=None):
    """The answer to a request; `refused` is whether it has to be refused, None where it may be either."""
    started = time.monotonic()
    result = CliRunner().invoke(main, args, prog_name="ctrans", input="y\n" * 9)
    seconds = time.monotonic() - started
    faults = []
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        faults.append("traceback: " + "".join(traceback.format_exception(result.exception)[-4:])[-1500:])
    if result.exit_code not in (0, *REFUSED):
        faults.append(f"exit code {result.exit_code}")
    if refused and result.exit_code == 0:
        faults.append("not refused")
    if result.exit_code == 2 and (result.stderr.count("\n") != 1 or not result.stderr.startswith("ctrans: ")):
        faults.append("more than a line")
    if "Traceback" in result.output or "[y/N]" in result.output:
        faults.append("a traceback or a question in what is printed")
    if seconds > SECONDS:
        faults.append(f"{seconds:.0f} seconds")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if most > BYTES:
        faults.append(f"{most / 1e9:.1f} GB")
    return Answer(list(args), result.exit_code, result.stdout, result.stderr, seconds, faults)
