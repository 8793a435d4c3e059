"""What runs in a guarded copy of the process: its result comes back, and what it prints goes nowhere."""

import os

from ctrans.interop.subprocess_guard import run_guarded


def test_what_a_library_prints_in_the_copy_reaches_neither_stdout_nor_stderr(capfd):
    def prints():
        for stream in (1, 2):
            os.write(stream, b"\x1b[2J")
        return [7]

    assert run_guarded(prints, seconds=5, memory=1 << 30) == [7]
    assert capfd.readouterr() == ("", "")
