"""Resolves all extras at the versions of constraints.txt, and writes requirements.lock with the
hash of each file: `make lock`.

The lock holds for Linux, macOS and Windows with Python 3.11 and newer. It leaves out torch and its
builds of CUDA: which build of torch a machine needs depends on the machine, and each build has its
own index and its own hashes. It names no index.

`pip install --no-deps --require-hashes --requirement requirements.lock` installs it, after torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
HEADING = """\
# Made by `make lock`: all that the extras need, each file by its hash. Without torch and its CUDA: their builds differ by machine.
# pip install torch==VERSION, then pip install --no-deps --require-hashes --requirement requirements.lock
"""
LEFT_OUT = re.compile(r"torch$|triton$|nvidia-|cuda-")
"""Names of torch and of what only its CUDA builds need."""
NAME = re.compile(r"^([a-z0-9][a-z0-9.-]*)==(\S+)", re.M)
"""A pinned package: its name and its version."""


def lock() -> str:
    """The text of the lock, made anew by uv in an environment of its own."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([f"{place}/bin/pip", "install", "--quiet", "uv"], check=True)
        asked = [
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--python-version",
            "3.11",
            "--all-extras",
            "--no-header",
            "--no-annotate",
        ]
        resolve = [f"{place}/bin/uv", *asked, "--constraint", "constraints.txt", "pyproject.toml"]

        def resolved(*more: str) -> str:
            return subprocess.run(
                [*resolve, *more], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout

        left_out = sorted({name for name, _ in NAME.findall(resolved()) if LEFT_OUT.match(name)})
        pinned = resolved("--generate-hashes", *(f"--no-emit-package={name}" for name in left_out))
    return HEADING + "".join(
        line for line in pinned.splitlines(keepends=True) if not line.startswith("#")
    )


if __name__ == "__main__":
    LOCK.write_text(lock())
    print(f"{LOCK.name}: {len(NAME.findall(LOCK.read_text()))} packages")
