"""Work goes on where stderr is full or closed."""

import os
import subprocess
import sys

import pytest

WORK = """
from ctrans.cli.say import say
from ctrans.report import progress

progress.PATIENCE = progress.LONG = 0.0
with progress.progress_bar("work", 10**9) as advance:
    for _ in range(3):
        advance("a piece")
    assert advance._printed > 0, "the bar said how long it takes"
say("a message", error=True)
print("done")
"""


@pytest.mark.parametrize("kind", ["full", "without a reader"])
def test_work_goes_on_when_stderr_takes_nothing(kind):
    if kind == "full":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stderr = os.pipe()
        os.close(reader)
    command = [sys.executable, "-c", WORK]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)
    os.close(stderr)
    assert (done.returncode, done.stdout) == (0, "done\n")
