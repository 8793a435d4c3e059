"""What runs in a guarded copy of the process: its result comes back, and what it prints goes
nowhere.
"""

import os
import resource
import subprocess
import sys

from ctrans.interop.subprocess_guard import run_guarded


def test_what_a_library_prints_in_the_copy_reaches_neither_stdout_nor_stderr(capfd):
    def prints():
        for stream in (1, 2):
            os.write(stream, b"\x1b[2J")
        return [7]

    assert run_guarded(prints, seconds=5, memory=1 << 30) == [7]
    assert capfd.readouterr() == ("", "")


def test_a_limit_of_the_user_below_that_of_the_guard_is_kept():
    code = (
        "from ctrans.interop.subprocess_guard import run_guarded; print(run_guarded(lambda: 7,"
        " seconds=5, memory=1 << 50))"
    )

    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))

    ran = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=limited, capture_output=True, text=True
    )
    assert ran.stdout == "7\n", ran.stderr
