"""What a monitor has to remember for a training that stops and goes on: plain JSON, exact to the
bit.

A list of numbers is one text, its float64 in base64; the sample of the weights before a step is one
text of float32 for each.
"""

from __future__ import annotations

import base64
import collections
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ctrans.given_files import read_json
from ctrans.monitor.gauge_table import Figures
from ctrans.monitor.past import Past

Memory = dict[str, Any]
MEMORY = "monitor.json"
"""The file of it, beside a checkpoint's."""


@runtime_checkable
class Remembers(Protocol):
    """A monitor."""

    def memory(self) -> Memory: ...


def memory_in(directory: Path, step: int) -> Memory | None:
    """What was saved there for that step; None at the start, and where nothing was. Raises
    ConfigError for what is no JSON.
    """
    path = directory / MEMORY
    if not step or not path.is_file():
        return None
    found: Memory = read_json(path)
    return found if isinstance(found, dict) and found.get("step") == step else None


def save_memory(monitor: Remembers, directory: Path) -> None:
    """Writes it there."""
    (directory / MEMORY).write_text(json.dumps(monitor.memory(), allow_nan=False))


def packed(values: Sequence[float]) -> str:
    """float64 in base64, the least significant byte first."""
    return base64.b64encode(np.asarray(values, dtype="<f8").tobytes()).decode()


def unpacked(text: str) -> list[float]:
    """What `packed` was given."""
    found: list[float] = np.frombuffer(base64.b64decode(text), dtype="<f8").tolist()
    return found


def of_figures(figures: Figures) -> Memory:
    """A report's figures: numbers of the run as lists of one."""
    return {
        "run": {name: packed([value]) for name, value in figures.items() if not isinstance(value, list)},
        "by": {name: packed(value) for name, value in figures.items() if isinstance(value, list)},
    }


def figures_of(memory: Memory) -> Figures:
    """What `of_figures` was given."""
    run: Figures = {name: unpacked(text)[0] for name, text in memory["run"].items()}
    return {**run, **{name: unpacked(text) for name, text in memory["by"].items()}}


def of_past(past: Past) -> Memory:
    """Reports, losses and norms of a past."""
    return {
        "heads": list(past.heads),
        "half": past.half,
        "first": of_figures(past.first),
        "reports": [[step, of_figures(figures)] for step, figures in past.reports],
        "losses": of_steps(past.losses),
        "norms": of_steps(past.norms),
        "probes": [[step, of_figures({**figures})] for step, figures in past.probes],
    }


def into_past(past: Past, memory: Memory) -> None:
    """Puts there what `of_past` was given."""
    past.heads, past.half, past.first = list(memory["heads"]), bool(memory["half"]), figures_of(memory["first"])
    past.reports.extend((step, figures_of(figures)) for step, figures in memory["reports"])
    past.losses.extend(steps_of(memory["losses"]))
    past.norms.extend(steps_of(memory["norms"]))
    past.probes.extend((step, figures_of(figures)) for step, figures in memory["probes"])  # type: ignore[misc]  # all are numbers


def of_steps(pairs: collections.deque[tuple[int, float]] | Sequence[tuple[int, float]]) -> Memory:
    """Steps and a number of each."""
    return {"steps": [step for step, _ in pairs], "values": packed([value for _, value in pairs])}


def steps_of(memory: Mapping[str, Any]) -> list[tuple[int, float]]:
    """What `of_steps` was given."""
    return list(zip(memory["steps"], unpacked(memory["values"]), strict=True))


def of_weights(groups: Sequence[Sequence[Tensor]] | None) -> list[list[str]] | None:
    """A sample of the weights, in float32."""
    if groups is None:
        return None
    return [[base64.b64encode(part.cpu().numpy().astype("<f4").tobytes()).decode() for part in group] for group in groups]


def weights_of(memory: list[list[str]] | None, device: torch.device) -> list[list[Tensor]] | None:
    """What `of_weights` was given."""
    if memory is None:
        return None
    return [
        [torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype="<f4").copy()).to(device) for text in group]
        for group in memory
    ]
