"""A run small enough to be repeated many times."""

import torch

from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.training.data import from_text
from ctrans.training.loop import carry_out
from ctrans.training.parallel import PARALLEL
from ctrans.training.processes import Processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import anew, resumed, with_settings
from ctrans.training.settings import TrainConfig
from ctrans.training.training_state import read_state

ALONE = Processes(torch.device("cpu"))
TEXT = bytes(range(32, 127)) * 20
MODEL = {"vocab_size": 256, "context": 8, "depth": 2, "width": 16, "heads": 2}
SETTINGS = {
    "iterations": 12,
    "batch": 4,
    "warmup": 3,
    "eval_every": 4,
    "eval_windows": 5,
    "save_every": 3,
    "learning_rate": 1e-2,
}


def start(directory, model=None, text=TEXT, overwrite=False, **changes):
    """A new run and its progress, ready for `carry_out`."""
    config = GPTConfig(**{**MODEL, **(model or {})})
    settings = TrainConfig(**{**SETTINGS, **changes})
    data = from_text(text, config.context)
    weights = GPT(config, seed=settings.seed)
    return anew(
        weights,
        settings,
        data,
        RunDirectory(directory),
        PARALLEL["none"],
        ALONE,
        source={},
        overwrite=overwrite,
    )


def resume(directory, text=TEXT, **changes):
    """The run in that directory, taken up from its last checkpoint."""
    store = RunDirectory(directory)
    state = with_settings(read_state(store.verified_last()), changes)
    return resumed(state, from_text(text, MODEL["context"]), store, PARALLEL["none"], ALONE)


def weights_after(directory, **changes):
    """The weights of an uninterrupted run."""
    run, progress = start(directory, **changes)
    carry_out(run, progress)
    return weights(run)


def weights(run):
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
