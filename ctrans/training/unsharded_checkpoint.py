"""A checkpoint of a run whose weights each process has all of."""

from __future__ import annotations

from pathlib import Path

import torch

from ctrans.model import checkpoint
from ctrans.model.gpt import GPT
from ctrans.training.processes import Processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.training_state import State, optimiser_tensors, write_optimiser


def save_whole(store: RunDirectory, state: State, model: GPT, optimiser: torch.optim.Optimizer, processes: Processes) -> None:
    """The first process, which has all weights, writes model, optimiser and state."""
    if not processes.first:
        return

    def write(directory: Path) -> None:
        checkpoint.save(model, directory)
        write_optimiser(directory, optimiser_tensors(model, optimiser))
        state.write(directory)

    progress = state.progress
    store.save(progress.step, write, best=progress.best_step, good=progress.good)
