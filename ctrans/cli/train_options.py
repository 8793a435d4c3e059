"""The request of `ctrans train`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ctrans.base.option import COUNT, Range, option
from ctrans.cli.click_options import OptionValues, settings_of
from ctrans.cli.request import Request, WrittenRequest, absolute_paths
from ctrans.model.config import GPTConfig
from ctrans.model.text import VOCABULARY
from ctrans.training.execution import Execution
from ctrans.training.monitor import REACTIONS
from ctrans.training.parallel import PARALLEL
from ctrans.training.processes import number_of_processes
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS, Task
from solvers import ConfigError

MOST_THREADS = 256
"""The largest --threads on a machine with fewer processors. Too many threads end the process."""
GPT2_VOCABULARY = 50304
"""The vocabulary of nanoGPT's .bin files: GPT-2's 50257 tokens, rounded up to a multiple of 64."""


@dataclass(frozen=True, kw_only=True)
class OfTraining(WrittenRequest):
    """A request for a model and data to train it on. `config` has fields of `GPTConfig`, `training`
    fields of `TrainConfig`.
    """

    config: OptionValues = settings_of(GPTConfig)
    training: OptionValues = settings_of(TrainConfig)
    task: str = option(
        "text",
        "What the model learns. text: predict each next token. digits: a small vision Transformer"
        " classifies scikit-learn's 1,797 images of handwritten digits, 8 x 8 pixels. Each pixel"
        " is a patch, the class token comes last, and all tokens attend to all. Every evaluation"
        " prints the accuracy on the held-out fifth. recall: 4 keys with a value each, then the"
        " keys in another order, each of which asks for its value. counting: how often each symbol"
        " came before, modulo 4. modular: sums modulo 23. A model without depth only guesses at"
        " these. ctrans downloads nothing.",
        group="Data",
        choices={"text": None, **TASKS},
    )
    file: Path | None = option(
        None,
        "Train on this file's bytes.",
        group="Data",
        default_words="Python's language documentation",
    )
    bin: Path | None = option(
        None, "Train on nanoGPT's train.bin and val.bin in this directory.", group="Data"
    )
    vocab_size: int | None = option(
        None,
        "Size of the vocabulary.",
        group="Data",
        default_words=f"{VOCABULARY}, for bytes; {GPT2_VOCABULARY} with --bin",
    )

    defaults: ClassVar[OptionValues] = {
        "depth": 4,
        "width": 128,
        "heads": 4,
        "context": 64,
        "initialisation": "xavier",
        "embedding_std": 0.1,
    }
    """A size that two cores train in two minutes, and the initialisation that trains best at that
    size.
    """
    common: ClassVar[frozenset[str]] = frozenset(
        {
            "placement",
            "context",
            "depth",
            "width",
            "heads",
            "dt",
            "norm",
            "seed",
            "task",
            "file",
            "bin",
            "batch",
            "json_path",
            "html_path",
            "verbose",
            "explain",
            "out",
        }
    )

    @property
    def model(self) -> GPTConfig:
        """The architecture. Raises ConfigError for an invalid one."""
        task = self._task
        if task is not None:
            other_fields = {
                name: value for name, value in self.config.items() if name not in task.architecture
            }
            return GPTConfig(**task.architecture, **other_fields)
        if self.vocab_size is not None:
            vocabulary = self.vocab_size
        elif self.bin is None:
            vocabulary = VOCABULARY
        else:
            vocabulary = GPT2_VOCABULARY
        return GPTConfig(vocabulary, **self.config)

    @property
    def settings(self) -> TrainConfig:
        """The training's settings. Raises ConfigError for invalid ones."""
        settings = dict(self.training)
        task = self._task
        if task is not None:
            for name, value in task.settings.items():
                if name not in self.typed:
                    settings[name] = value
        return TrainConfig(**settings)

    def as_trained(self, model: GPTConfig, training: TrainConfig) -> dict[str, Any]:
        """The values of this request's options that the model and the training have: a task, a
        model to start from, or a run to resume decides some of them.
        """
        decided = {**vars(model), **vars(training)}
        return {name: value for name, value in decided.items() if name in self.options}

    @property
    def source(self) -> dict[str, str | None]:
        """The task, or the data's paths."""
        if self._task is not None:
            return {"task": self.task}
        return absolute_paths(file=self.file, bin=self.bin)

    @property
    def _task(self) -> Task | None:
        """The task; None for a text. Raises ConfigError for options that the task sets itself."""
        if self.task == "text":
            return None
        task = TASKS[self.task]
        brought = [name for name in ("file", "bin", *task.architecture) if name in self.typed]
        if brought:
            raise ConfigError(
                f"--task {self.task} brings its own {', '.join(brought)}: leave the option out"
            )
        return task


@dataclass(frozen=True, kw_only=True)
class TrainRequest(OfTraining):
    """The request of `train`."""

    out: Path = option(Path("out/train"), "Directory of the run.", group="Output")
    origin: Path | None = option(
        None,
        "Start from the model of this run or checkpoint. With --depth ctrans interpolates its"
        " weights to another number of blocks over the same depth-time (for a stack, with"
        " --stack-steps to other steps).",
        flags="--from",
        metavar="RUN",
        default_words="fresh weights",
    )
    resume: bool = option(
        default=False,
        help="Continue the run in --out exactly. Under torchrun, start a run if there is none. You"
        " can leave options out, or change some, such as --learning-rate and --iterations.",
    )
    overwrite: bool = option(default=False, help="Remove the run in --out and start again.")
    parallel: str = option(
        "none", "How the processes of torchrun share the work.", group="Device", choices=PARALLEL
    )
    threads: int | None = option(
        None,
        "CPU threads.",
        group="Device",
        limits=Range(1, max(MOST_THREADS, os.cpu_count() or 1)),
        default_words="OMP_NUM_THREADS, or by the model's size; as before with --resume",
    )
    eval_depth: tuple[int, ...] = option(
        (),
        "Repeatable: also evaluate at this depth, over the same depth-time.",
        default_words="none, or as before with --resume",
    )
    use_tensorboard: bool | None = option(
        None,
        "Also write TensorBoard's files to --out.",
        flags="--tensorboard",
        default_words="no, or as before with --resume",
    )
    monitor: bool | None = option(
        None,
        "Monitor the run: write figures by depth and alarms to --out. ctrans watch shows them. A"
        " resumed run goes on as before, with its --every, --probe-every and --react.",
        group="Monitor",
    )
    every: int = option(
        50, "Iterations between the monitor's reports.", group="Monitor", limits=COUNT
    )
    probe_every: int | None = option(
        None,
        "Iterations between the monitor's passes over a fixed batch.",
        group="Monitor",
        limits=COUNT,
        default_words="none",
    )
    react: tuple[str, ...] = option(
        (),
        "Repeatable: what the monitor does. It can skip a step with a non-finite gradient, save a"
        " checkpoint before a step with a danger, or end the run. In a trial, skip healed 10 of 12"
        " runs with a nan in one batch and acted in 0 of 12 healthy ones.",
        group="Monitor",
        choices=dict.fromkeys(REACTIONS),
        default_words="nothing",
    )
    device: str = option(
        "cpu",
        "cpu, cuda, cuda:1.",
        group="Device",
        default_words="cpu, or as before with --resume",
    )

    common: ClassVar[frozenset[str]] = OfTraining.common | {
        "iterations",
        "learning_rate",
        "optimiser",
        "method",
        "device",
        "origin",
        "resume",
        "overwrite",
        "monitor",
    }
    unshown = Request.unshown

    def as_before(self, execution: Execution) -> TrainRequest:
        """The request to resume a run that was executed so: what the user did not type is as
        before. With another number of processes, the threads are not.
        """
        before: dict[str, Any] = {
            "device": execution.device,
            "use_tensorboard": execution.tensorboard,
            "eval_depth": execution.eval_depth,
        }
        if execution.processes == number_of_processes():
            before["threads"] = execution.threads
        changes: dict[str, Any] = {
            name: value
            for name, value in before.items()
            if name not in self.typed and value is not None
        }
        return replace(self, **changes)

    @property
    def typed_options(self) -> dict[str, Any]:
        """The options that were typed."""
        return {name: value for name, value in self.options.items() if name in self.typed}
