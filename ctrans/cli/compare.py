"""`ctrans compare`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from ctrans.base.option import option
from ctrans.cli.click_options import OptionValues
from ctrans.cli.diagnose import STOPPED
from ctrans.cli.ending import directory_of, end
from ctrans.cli.inputs import Batch, read_batch, recorded_batch
from ctrans.cli.model_request import ComparisonRequest
from ctrans.cli.model_sources import ModelSource, find_models, labels
from ctrans.cli.request import command_of
from ctrans.examine.compared import as_object, measured
from ctrans.examine.comparison.compare import compare
from ctrans.examine.comparison.recording import Recording, is_recording, read_recording
from ctrans.report.progress import progress_bar
from ctrans.training.compared_runs import RunParting, is_run, parting_of, with_runs
from ctrans.training.run_directory import RunDirectory
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareRequest(ComparisonRequest):
    """The request of `compare`."""

    fail_on: str | None = option(
        None,
        "Exit with code 3 if a part changed by more than rounding. All files are written before.",
        choices={"change": None},
    )

    defaults: ClassVar[OptionValues] = {**ComparisonRequest.defaults, "batch": 2}
    common: ClassVar[frozenset[str]] = (ComparisonRequest.common - {"norm"}) | {"fail_on"}


@command_of(CompareRequest, "compare")
def command(request: CompareRequest) -> None:
    """Say where two models part, and whether it matters: a port, a fused kernel, a precision.

    Both MODELs read the same text. Each part of the second one, from the embedding to the head,
    runs on the first one's states. What it does otherwise there is its own, and not inherited. What
    rounding would make of the part is measured too, which tells a fault from rounding. The
    difference of the losses is divided among the parts: the shares add up to it.

    Two training runs are compared by their logs too: the first step at which they part, and the
    first tensor.

    One MODEL may be a recording: a file of safetensors with the states of a program that ctrans
    does not run, as of JAX, and the tokens that it read.

    \b
    ctrans compare models/llama models/port
    ctrans compare models/gpt2 models/gpt2-bf16 --file book.txt
    ctrans compare run/step-1000 other/step-1000 --fail-on change
    ctrans compare out/run out/other-machine
    ctrans compare port.safetensors models/llama
    ctrans compare --python model.py:eager --python model.py:fused --example model.py:batch

    Exit codes: 0 success, changed or not. 1 the computation failed. 2 invalid input.
    3 --fail-on found a change.
    """
    runs: RunParting | None = None
    if len(request.named) == 2 and all(is_run(path) for path in request.named):
        runs = parting_of(*request.named)
    recordings = [path for path in request.named if is_recording(path)]
    if recordings:
        pair = _with_recording(request, recordings)
    else:
        pair = _two_models(request, runs)
    directory = directory_of(request)
    with progress_bar("compare", pair.batch.sources[0].segments + 2) as advance:

        def progress(part: int) -> None:
            advance(f"part {part}", 1)

        second = pair.batch.sources[-1].model(request)
        first: Any = pair.recording
        if pair.recording is None:
            first = pair.batch.sources[0].model(request)
        found = compare(first, second, pair.batch.tokens, pair.batch.targets, progress=progress)
    table = measured(*pair.names, found)
    if runs is not None:
        table = with_runs(table, *pair.names, runs)
    failures = []
    if request.fail_on and found.changed:
        count = len(found.changed)
        parts = "1 part" if count == 1 else f"{count} parts"
        failures.append(f"{parts} changed (--fail-on change)")
    end(
        request,
        directory,
        inputs=pair.batch,
        result=as_object(found) | ({} if runs is None else {"runs": vars(runs)}),
        measured=table,
        failures=failures,
        code=STOPPED,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _ToCompare:
    """What is compared: the names of both sides, the models with what they read, and the recording
    that takes the place of the first model, if there is one.
    """

    names: tuple[str, str]
    batch: Batch
    recording: Recording | None = None


def _two_models(request: CompareRequest, runs: RunParting | None) -> _ToCompare:
    """Two models; of two runs those of the first checkpoint that differs, or the last ones."""
    given = request
    if runs is not None and runs.checkpoint is not None:
        places = [RunDirectory(path).step_directory(runs.checkpoint) for path in request.named]
        given = dataclasses.replace(request, named=tuple(places))
    sources = find_models(given)
    if len(sources) != 2:
        count = len(sources)
        if count == 1:
            count = len(given.named_models)  # without a name there is the default model
        raise ConfigError(f"ctrans compare takes two models, and {count} are given: name two")
    has_loss = all(_has_loss(source) for source in sources)
    batch = read_batch(request, sources, targets=has_loss)
    names = [source.name for source in sources]
    if runs is not None:
        names = labels([str(path) for path in request.named])
    return _ToCompare((names[0], names[1]), batch)


def _with_recording(request: CompareRequest, recordings: list[Path]) -> _ToCompare:
    """A recording and a model on the recording's tokens."""
    models = dataclasses.replace(
        request, named=tuple(path for path in request.named if path not in recordings)
    )
    given = [str(value) for _, value in models.named_models]
    if len(recordings) > 1 or len(given) != 1:
        raise ConfigError(
            f"ctrans compare takes two models, of which one may be a recording"
            f" ({recordings[0].name}), and {len(recordings)} recordings and {len(given)} models are"
            " given: name one of each"
        )
    texts = [
        f"--{name}"
        for name in ("file", "text", "ids", "images", "example")
        if getattr(request, name)
    ]
    texts += [f"--{name}" for name in ("context", "batch") if name in request.typed]
    if texts:
        raise ConfigError(
            f"{str(recordings[0])!r} has the tokens that it is of: leave {texts[0]} out"
        )
    recording = read_recording(recordings[0])
    (source,) = find_models(models)
    first, second = labels([str(recordings[0]), given[0]])
    batch = recorded_batch(models, source, recording, targets=_has_loss(source))
    return _ToCompare((first, second), batch, recording)


def _has_loss(source: ModelSource) -> bool:
    return source.opened is None or source.opened.loss != "none"
