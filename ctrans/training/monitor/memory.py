"""The memory of a monitor, for a training that resumes from a checkpoint: plain JSON, exact to the
bit.

A list of numbers is one text, float64 in base64. Samples of weights are texts of float32.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctrans.base.given_files import read_json
from ctrans.training.monitor.past import Past
from ctrans.training.monitor.training_measures import Figures

Memory = dict[str, Any]
MEMORY = "monitor.json"
"""Its file in the directory of a checkpoint."""
OPTIONS = "options"
"""The key of the options with which a run is monitored, so that a resumed run keeps them."""


def memory_in(directory: Path, step: int) -> Memory | None:
    """The memory saved there for that step, None at step 0 or if there is none. Raises ConfigError
    for a file that is not JSON.
    """
    path = directory / MEMORY
    if not step or not path.is_file():
        return None
    memory: Memory = read_json(path)
    if isinstance(memory, dict) and memory.get("step") == step:
        return memory
    return None


def options_in(directory: Path) -> Memory | None:
    """The options of the monitor whose memory is saved there; None if no monitor saved there. They
    are empty in files from before ctrans kept them. Raises ConfigError for a file that is not JSON.
    """
    path = directory / MEMORY
    if not path.is_file():
        return None
    memory = read_json(path)
    options = memory.get(OPTIONS) if isinstance(memory, dict) else None
    if isinstance(options, dict):
        return options
    return {}


def packed(values: Any, dtype: str = "<f8") -> str:
    """Numbers in base64, by default as float64, little-endian."""
    return base64.b64encode(np.asarray(values, dtype=dtype).tobytes()).decode()


def unpacked(text: str, dtype: str = "<f8") -> list[float]:
    """The inverse of `packed`."""
    values: list[float] = np.frombuffer(base64.b64decode(text), dtype=dtype).tolist()
    return values


def of_figures(figures: Figures) -> Memory:
    """The figures of a report."""
    return {
        "run": {
            name: packed([value]) for name, value in figures.items() if not isinstance(value, list)
        },
        "by": {name: packed(value) for name, value in figures.items() if isinstance(value, list)},
    }


def figures_of(memory: Memory) -> Figures:
    """The inverse of `of_figures`."""
    run: Figures = {name: unpacked(text)[0] for name, text in memory["run"].items()}
    return {**run, **{name: unpacked(text) for name, text in memory["by"].items()}}


def of_past(past: Past) -> Memory:
    """The reports, losses, norms and probes of a past."""
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
    """Fills a new past; the inverse of `of_past`."""
    past.heads = list(memory["heads"])
    past.half = bool(memory["half"])
    past.first = figures_of(memory["first"])
    past.reports.extend((step, figures_of(figures)) for step, figures in memory["reports"])
    past.losses.extend(steps_of(memory["losses"]))
    past.norms.extend(steps_of(memory["norms"]))
    past.probes.extend((step, figures_of(figures)) for step, figures in memory["probes"])  # type: ignore[misc]  # all are numbers


def of_steps(pairs: Collection[tuple[int, float]]) -> Memory:
    """(step, value) pairs."""
    return {"steps": [step for step, _ in pairs], "values": packed([value for _, value in pairs])}


def steps_of(memory: Mapping[str, Any]) -> list[tuple[int, float]]:
    """The inverse of `of_steps`."""
    return list(zip(memory["steps"], unpacked(memory["values"]), strict=True))


def of_weights(groups: Sequence[Sequence[Tensor]] | None) -> list[list[str]] | None:
    """Samples of groups of weights, as float32."""
    if groups is None:
        return None
    return [[packed(part.cpu(), "<f4") for part in group] for group in groups]


def weights_of(memory: list[list[str]] | None, device: torch.device) -> list[list[Tensor]] | None:
    """The inverse of `of_weights`."""
    if memory is None:
        return None
    return [
        [torch.tensor(unpacked(text, "<f4"), dtype=torch.float32, device=device) for text in group]
        for group in memory
    ]
