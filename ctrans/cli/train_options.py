"""The options of `ctrans train`: those of the model, of the data, and one for every training setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import click

from ctrans.cli import options
from ctrans.cli.request import Request, WrittenRequest
from ctrans.model.config import GPTConfig
from ctrans.model.text import VOCABULARY
from ctrans.monitor.reactions import REACTIONS
from ctrans.placement import PLACEMENTS
from ctrans.training.optimiser import OPTIMISERS
from ctrans.training.parallel import PARALLEL
from ctrans.training.schedule import SCHEDULES
from ctrans.training.settings import PRECISIONS, TrainConfig
from ctrans.training.tasks import TASKS, Task
from solvers import GRADIENTS, ConfigError
from solvers.errors import look_up

DEFAULTS = {"depth": 4, "width": 128, "heads": 4, "context": 64, "dt": 0.1, "initialisation": "xavier", "embedding_std": 0.1}
"""A size that two cores train in two minutes, and what was found to train best at it."""
GPT2_VOCABULARY = 50304
"""What nanoGPT's .bin files need: GPT-2's 50257 tokens, rounded up to a multiple of 64."""

ARCHITECTURE = (
    *options.ARCHITECTURE,
    *("placement", "norm", "depth_weights", "knots", "ffn_width", "bias", "temperature", "eps", "alpha"),
)
"""Names of options that are fields of `GPTConfig`."""

# One option for each field of TrainConfig, in this order; the defaults are that class's.
SETTINGS = {
    "iterations": "Updates of the weights.",
    "batch": "Sequences of a micro-batch, over all processes.",
    "accumulate": "Micro-batches of an iteration.",
    "optimiser": f"{options.one_of(OPTIMISERS).capitalize()}.",
    "learning_rate": "Its peak.",
    "min_learning_rate": "Where the cosine ends.  [default: a tenth of the peak]",
    "warmup": "Iterations of linear growth of the learning rate.",
    "schedule": f"{options.one_of(SCHEDULES).capitalize()}: how it grows; nanoGPT's first of w steps is 1/(w + 1) of the peak, ours 1/w.",
    "weight_decay": "Of matrices only, unless gains decay too.",
    "decay_gains": "Let norms' gains and offsets, and biases, decay too: what a finite H behind an output norm takes.",
    "beta1": "Decay of the first moment; momentum of sgd.",
    "beta2": "Decay of the second moment.",
    "clip": "Largest norm of the gradient.",
    "temperature_start": "Attention's temperature at first, decaying to --temperature.",
    "temperature_steps": "Iterations of that decay.",
    "kinetic": "lam of the running cost lam/2 int |v|^2 dt.",
    "balance": "Weight of the load-balancing loss of a mixture of experts, summed over FFNs.",
    "router_z": "Weight of its router's z-loss, likewise.",
    "bias_rate": "By how much each update moves the biases that balance experts without a loss; 0 leaves them.",
    "low_rank": "Rank r: train W + B A for each linear map W of the model of --from, of A and B alone; 0 trains all weights.",
    "method": options.METHOD_HELP,
    "steps": "Steps per segment of a fixed-step method.",
    "rtol": "Relative tolerance of an adaptive method.  [default: 1e-6]",
    "atol": "Absolute tolerance of an adaptive method.  [default: 1e-8]",
    "gradient": f"{options.one_of(GRADIENTS).capitalize()}.",
    "dtype": f"{options.one_of(PRECISIONS).capitalize()}; bfloat16 is autocast.",
    "compile": "Compile the model.",
    "eval_every": "Iterations between validation losses.",
    "eval_windows": "Validation sequences, evenly spaced, always the same.",
    "save_every": "Iterations between checkpoints; the best is always kept.",
    "theta": "Measure attention's balanced-mass factor with every validation loss.",
    "margin": "Nats above the first validation loss from which a run counts as diverging.",
    "patience": "Validation losses in a row above it that end the run.",
}
NUMBERS = {"min_learning_rate": float, "temperature_start": float, "rtol": float, "atol": float}
"""Types of settings whose default, None, has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRequest(WrittenRequest):
    """What `train` is asked. Options of the model and of the training are fields of `model` and `settings`, checked when asked for.

    - `resume`, `overwrite`, `out`: which run it is; `origin`: the trained model that it begins with
    - `task`, `file`, `bin`, `vocab_size`: what it is trained on
    - `parallel`, `threads`, `device`: on what
    - `eval_depth`, `use_tensorboard`: what is done beside; `monitor`, `every`, `probe_every`, `react`: and watched
    """

    out: Path
    origin: Path | None
    resume: bool
    overwrite: bool
    task: str
    file: Path | None
    bin: Path | None
    vocab_size: int | None
    parallel: str
    threads: int | None
    device: str
    eval_depth: tuple[int, ...]
    use_tensorboard: bool
    monitor: bool
    every: int
    probe_every: int | None
    react: tuple[str, ...]

    unshown: ClassVar[frozenset[str]] = Request.unshown

    @property
    def model(self) -> GPTConfig:
        """The architecture. Raises ConfigError for what cannot be."""
        task = self._task
        if task is not None:
            own = {name: self.options[name] for name in ARCHITECTURE if name not in task.architecture}
            return GPTConfig(**task.architecture, **own)
        default = VOCABULARY if self.bin is None else GPT2_VOCABULARY
        vocabulary = default if self.vocab_size is None else self.vocab_size
        return GPTConfig(vocabulary, **{name: self.options[name] for name in ARCHITECTURE})

    @property
    def settings(self) -> TrainConfig:
        """The settings of the training. Raises ConfigError for what cannot be."""
        own = {name: self.options[name] for name in SETTINGS}
        usual = {} if self._task is None else {name: v for name, v in self._task.settings.items() if name not in self.typed}
        return TrainConfig(seed=self.options["seed"], **(own | usual))

    @property
    def source(self) -> dict[str, str | None]:
        """Where the data are."""
        if self._task is not None:
            return {"task": self.task}
        return {name: None if path is None else str(path.absolute()) for name, path in (("file", self.file), ("bin", self.bin))}

    @property
    def _task(self) -> Task | None:
        """The task, where it is not a text's. Raises ConfigError for an unknown one, and for options that it brings itself."""
        if self.task == "text":
            return None
        task = look_up("task", self.task, {"text": None, **TASKS})
        assert task is not None
        brought = [name for name in ("file", "bin", *task.architecture) if name in self.typed]
        if brought:
            raise ConfigError(f"--task {self.task} brings its own {', '.join(brought)}: leave the option out")
        return task

    @property
    def given(self) -> dict[str, Any]:
        """The options that were typed."""
        return {name: value for name, value in self.options.items() if name in self.typed}


def setting_options() -> Callable[[options.Command], options.Command]:
    """The options for the training settings."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    return options.stack(*(_option(name, defaults[name], text) for name, text in SETTINGS.items()))


def _option(name: str, default: Any, text: str) -> Callable[[options.Command], options.Command]:
    flag = "--" + name.replace("_", "-")
    if isinstance(default, bool):
        return click.option(flag, is_flag=True, default=default, help=text)
    return click.option(
        flag,
        name,
        default=default,
        type=NUMBERS.get(name),
        show_default=default is not None,
        metavar=_metavar(default),
        help=text,
    )


def _metavar(default: Any) -> str | None:
    return "NAME" if isinstance(default, str) else None


model_options = options.stack(
    click.option(
        "--placement",
        default="peri",
        show_default=True,
        metavar="NAME",
        help=f"{options.one_of(PLACEMENTS).capitalize()}; {options.MIXED}.",
    ),
    options.architecture_options,
    options.depth_weights_options,
    click.option("--ffn-width", type=int, help="Hidden width of the FFN.  [default: 4 width; 8/3 width where it is gated]"),
    click.option("--bias/--no-bias", default=True, show_default=True, help="Biases of maps, offsets of norms."),
    click.option("--temperature", default=1.0, show_default=True, help="Attention's temperature."),
    click.option("--eps", default=1e-5, show_default=True, help="eps of the norms."),
    click.option("--alpha", type=float, help="Of placement deepnorm.  [default: (2 depth)^(1/4)]"),
)

data_options = options.stack(
    click.option(
        "--task",
        default="text",
        show_default=True,
        metavar="NAME",
        help=f"{options.one_of(['text', *TASKS]).capitalize()}. text: each next token. digits: the class of scikit-learn's 1,797 images of "
        "handwritten digits, 8 x 8 pixels, by a small vision Transformer: each pixel is a patch, a class token stands behind them, all "
        "tokens read all; accuracy on the fifth that is held out is printed with every evaluation. Nothing is downloaded.",
    ),
    click.option(
        "--file",
        type=click.Path(path_type=Path),
        help="Train on this file's bytes instead of the default text (Python's language documentation).",
    ),
    click.option("--bin", type=click.Path(path_type=Path), help="Train on nanoGPT's train.bin and val.bin in this directory."),
    click.option(
        "--vocab-size", type=int, help=f"Of the tokens.  [default: {VOCABULARY}, for bytes; {GPT2_VOCABULARY} with --bin]"
    ),
)

run_options = options.stack(
    click.option(
        "--out", type=click.Path(path_type=Path), default=Path("out/train"), show_default=True, help="Directory of the run."
    ),
    click.option(
        "--from",
        "origin",
        type=click.Path(path_type=Path),
        metavar="RUN",
        help="Begin with the model of this run or checkpoint; with --depth in another number of blocks over the same depth-time, weights "
        "interpolated (of a stack, with --stack-steps in other steps).  [default: fresh weights]",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on with the run in --out, exactly; under torchrun, start it if there is none. Options may be left out or, as "
        "--learning-rate and --iterations, given anew.",
    ),
    click.option("--overwrite", is_flag=True, help="Remove the run in --out and start anew."),
    click.option(
        "--parallel",
        default="none",
        show_default=True,
        metavar="NAME",
        help=f"{options.one_of(PARALLEL).capitalize()}: how the processes that torchrun started share the work.",
    ),
    click.option("--threads", type=int, help="Threads on the CPU.  [default: OMP_NUM_THREADS, or by the model's size]"),
    click.option("--eval-depth", type=int, multiple=True, help="Repeatable: evaluate at this depth too, at the same depth-time."),
    click.option("--tensorboard", "use_tensorboard", is_flag=True, help="Write TensorBoard's files too, in --out."),
    click.option("--monitor", is_flag=True, help="Watch the run: figures by depth and alarms, in --out, for ctrans watch."),
    click.option("--every", default=50, show_default=True, help="Iterations between the monitor's reports."),
    click.option("--probe-every", type=int, help="Iterations between its walks on a held batch.  [default: none]"),
    click.option(
        "--react",
        multiple=True,
        metavar="NAME",
        help=f"Repeatable: what the monitor does, {options.one_of(REACTIONS)}: leave out a step whose gradient spikes or is not finite; "
        "make a checkpoint before the step at which a danger is told; halve the learning rate at each danger; end the run.  "
        "[default: nothing]",
    ),
    options.device_option,
)
