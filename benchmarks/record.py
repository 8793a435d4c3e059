"""Writes a benchmark's output to the terminal, and to a dated file named by the hardware."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """The processor's model name as the system states it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def hardware() -> str:
    """A short name for file names: the GPU, or the number of processors."""
    return (
        torch.cuda.get_device_name().replace(" ", "-").lower()
        if torch.cuda.is_available()
        else f"cpu{os.cpu_count()}"
    )


def keep(name: str, lines: list[str]) -> None:
    """Prints the lines and writes them to a file of results."""
    path = write(name, lines)
    print(path.read_text())
    print(f"Kept in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def write(name: str, lines: list[str], directory: Path = RESULTS) -> Path:
    """Writes them to <name>-<date>-<hardware>.txt there, under a heading that says on what they
    were measured.
    """
    today = datetime.date.today().isoformat()
    heading = [
        f"{name}, {today}: {processor()}, {os.cpu_count()} processors, Python"
        f" {platform.python_version()}, torch {torch.__version__}"
    ]
    path = directory / f"{name}-{today}-{hardware()}.txt"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*heading, "", *lines]) + "\n")
    return path
