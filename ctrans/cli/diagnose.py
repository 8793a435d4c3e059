"""`ctrans diagnose`."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ctrans.base.option import NOT_NEGATIVE, POSITIVE, Range, option, options_of
from ctrans.cli.ending import check_file_of, directory_of, end
from ctrans.cli.inputs import Batch, read_batch
from ctrans.cli.model_request import ComparisonRequest
from ctrans.cli.model_sources import ModelSource, find_models, labels
from ctrans.cli.request import WrittenRequest, command_of
from ctrans.examine.diagnosed import measured
from ctrans.examine.diagnosis.diagnose import (
    Diagnosis,
    SearchRequest,
    diagnose,
    merged,
    readings_in,
)
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.examine.diagnosis.low_precision import PRECISION_CHECKS, PrecisionDiagnosis, weights_in
from ctrans.examine.diagnosis.treated_copy import to_treat, treat
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS, WEIGHT_CHECKS
from ctrans.examine.diagnosis.weights_only import (
    Change,
    change,
    updates,
    weight_diagnosis,
)
from ctrans.interop.checkpoint_weights import WeightReaders, WeightsAndBuffers, read_checkpoint
from ctrans.interop.promised_weights import family_directory, without_config
from ctrans.measure.findings import SEVERITIES, as_object, limits_in_words
from ctrans.report.gate import junit, of_baseline, read_baseline, sarif, stopping
from ctrans.report.ownership import place_of
from ctrans.report.progress import Bar, progress_bar
from solvers import ConfigError

STOPPED = 3
"""The exit code if findings of the severity --fail-on stop the gate."""
SEARCH_BATCH = 16
"""Sequences of a search."""


Diagnoses = dict[str, Diagnosis]
"""By the name of the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseRequest(ComparisonRequest):
    """The request of `diagnose`."""

    weight_decay: float | None = option(
        None,
        "The training's weight decay. ctrans compares it with dt lam*.",
        metavar="LAM",
        limits=NOT_NEGATIVE,
    )
    seeds: int = option(
        1,
        "Repeat the diagnosis on this many parts of the text, for a seeded model with new weights:"
        " findings get error bars.",
        limits=Range(1, 1000),
    )
    weights_only: bool = option(
        default=False,
        help="Read the weights alone, one tensor in memory at a time, without a text. MODEL may"
        " then also be a .safetensors file, or a distributed checkpoint of torch or Megatron"
        " (torch_dist). Codes of fp8, and of 8 bits with scales, become numbers.",
    )
    precision: str | None = option(
        None,
        "With --weights-only: also what the weights would lose in these formats. A scale for the"
        " tensor or for each N entries follows a colon: bf16,e4m3,e4m3:tensor,e4m3:128. Formats:"
        " bf16, fp16, e4m3 and e5m2. For activations, gradients and updates use"
        " ctrans.low_precision.",
        metavar="FORMATS",
    )
    search: float | None = option(
        None,
        "Also look for an edit that lowers the loss, for so many seconds: 120 suit a small model.",
        metavar="SECONDS",
        limits=POSITIVE,
    )
    baseline: Path | None = option(
        None,
        "The JSON of an earlier diagnosis, such as that of a healthy checkpoint. ctrans shows which"
        " figures changed since. --fail-on leaves out findings that it has at the same places.",
        metavar="FILE.json",
    )
    fail_on: str | None = option(
        None,
        "Exit with code 3 if there is a finding of this severity or a worse one. All files are"
        " written before.",
        choices=dict.fromkeys(SEVERITIES),
    )
    treat: Path | None = option(
        None,
        "After the finding 'sublayer output too large', write a copy of MODEL to this new"
        " directory, with outsized weights scaled back to those of other blocks. MODEL, a directory"
        " with safetensors, stays as it is. This healed 12 of 12 small models of a trial.",
        group="Output",
        metavar="DIRECTORY",
    )
    sarif: Path | None = option(
        None,
        "Also write the findings as SARIF 2.1.0, which code scanning reads.",
        group="Output",
        metavar="PATH",
    )
    junit: Path | None = option(
        None,
        "Also write the checks as JUnit test cases. Those that --fail-on names fail; without it,"
        " serious and broken ones.",
        group="Output",
        metavar="PATH",
    )

    common: ClassVar[frozenset[str]] = (ComparisonRequest.common - {"norm"}) | {
        "weight_decay",
        "seeds",
        "search",
        "weights_only",
        "baseline",
        "fail_on",
    }
    unshown: ClassVar[frozenset[str]] = ComparisonRequest.unshown | {"treat", "sarif", "junit"}


def _limits(heading: str, checks: Any) -> str:
    lines = (
        textwrap.fill(line, 78, initial_indent="- ", subsequent_indent="  ")
        for line in limits_in_words(checks)
    )
    return "\n".join(("\b", heading, *lines))


LIMITS = "\n\n".join(
    [
        _limits(
            "Every finding with its severity, what is measured, its limit, and who set it:", CHECKS
        ),
        _limits("With --weights-only:", WEIGHT_CHECKS),
        _limits("With --precision:", PRECISION_CHECKS),
        _limits("Between two models, or since the baseline:", CHANGE_CHECKS),
        (
            "Exit codes: 0 success, with or without findings. 1 the computation failed. 2 invalid"
            " input. 3 --fail-on found something."
        ),
    ]
)


@command_of(DiagnoseRequest, "diagnose", epilog=LIMITS)
def command(request: DiagnoseRequest) -> None:
    """List what is wrong with a model, most severe first: place, figure, effect and what helps.

    MODEL is a local Hugging Face directory, nanoGPT's ckpt.pt, or a model that ctrans saved;
    without one, a seeded GPT. ctrans diagnoses several models, such as checkpoints of one training,
    on the same text. One pass over the text looks for dead gains, saturated heads, massive
    activations, large sensitivities, collapsed tokens, blocks without effect, a weight decay that
    does not bound the weights, grown output norms, drifting logits, tied weights with opposing
    gradients, and non-finite numbers. The directory gets diagnose.json and diagnose.png.

    Of two checkpoints it also says what changed from the first to the second, by block: size of the
    update, spectral norms, stable ranks, gains, dead units and outlier channels.

    \b
    ctrans diagnose models/bert
    ctrans diagnose out/train --weight-decay 0.1 --seeds 5
    ctrans diagnose --placement none --init large
    ctrans diagnose step-1000 step-2000 --weights-only
    ctrans diagnose models/ill --treat models/treated
    ctrans diagnose models/new --weights-only --precision bf16,e4m3:tensor
    ctrans diagnose models/new --weights-only --baseline healthy.json --fail-on serious
    """
    unused_options: list[str] = []
    if request.weights_only:
        unused_options = _check_weights_only(request)
    baseline = None
    if request.baseline is not None:
        baseline = read_baseline(request.baseline)
    rounded = _in_formats(request)
    source = to_treat(request.named_models, request.treat)
    if request.weights_only:
        checks = WEIGHT_CHECKS
        results, batch, directory = _of_weights(request)
    else:
        checks = CHECKS
        results, batch, directory = _of_models(request)
    earlier_models: dict[str, Any] = {}
    if baseline is not None:
        earlier_models = {name: of_baseline(baseline, name) for name in results}
    changes: dict[str, Change | PrecisionDiagnosis] = {**_changes(request, results), **rounded}
    for name, earlier_model in earlier_models.items():
        changes[f"baseline to {name}"] = change(readings_in(earlier_model), results[name].readings)
    diagnoses = {**results, **changes}
    stops = {
        name: stopping(diagnosis, request.fail_on or "serious", earlier_models.get(name))
        for name, diagnosis in diagnoses.items()
    }
    files: dict[str, Callable[[], bytes]] = {}
    if request.sarif is not None:
        paths = _paths(request, results, diagnoses)
        files[str(request.sarif.absolute())] = partial(sarif, diagnoses, paths)
    if request.junit is not None:
        files[str(request.junit.absolute())] = partial(junit, diagnoses, stops)
    failures = []
    stop_count = sum(map(len, stops.values()))
    if request.fail_on and stop_count:
        findings_text = "finding" if stop_count == 1 else "findings"
        failures.append(
            f"{stop_count} {findings_text} of severity {request.fail_on} or worse (--fail-on)"
        )
    treatment = treat(source, request.treat, results)
    result = {
        "checks": {name: as_object(check) for name, check in checks.items()},
        "placements": results,
        "changes": changes,
        "treatment": treatment,
    }
    if batch is None:
        result = {"model": None, **result}
    end(
        request,
        directory,
        inputs=batch,
        options=dict.fromkeys(unused_options),
        result=result,
        measured=measured(results, changes, treatment),
        files=files,
        failures=failures,
        code=STOPPED,
    )


def _paths(
    request: DiagnoseRequest, results: Diagnoses, diagnoses: Iterable[str]
) -> dict[str, str]:
    """The path of each model by its name in results; of a change, that of its later model; of a
    model in a format, its own. What has no path keeps its name.
    """
    model_paths = {
        name: str(value) for name, (_, value) in zip(results, request.named_models, strict=False)
    }
    # a path may have the words of a change in it, so that names are made and not taken apart
    before = ["baseline", *results]
    of_changes = {
        f"{earlier} to {later}": path for later, path in model_paths.items() for earlier in before
    }
    by_name = {**of_changes, **model_paths}
    paths = {}
    for name in diagnoses:
        rounded = [model for model in model_paths if name.startswith(f"{model} to ")]
        if name in by_name:
            paths[name] = by_name[name]
        elif rounded:  # a model in a format of --precision
            paths[name] = model_paths[max(rounded, key=len)]
        else:
            paths[name] = name
    return paths


def _directory(request: DiagnoseRequest) -> Path | None:
    if request.treat is None:
        return directory_of(request)
    copy = place_of(request.treat)
    directory = request.out or Path("out") / request.command
    home = Path(os.path.realpath(directory))
    if copy in (home, *home.parents) and not (request.quiet and request.out is None):
        raise ConfigError(
            f"--treat {str(request.treat)!r} is a new directory, and the result would lie in it:"
            " choose another --treat or --out"
        )
    checked = directory_of(request, other_files=[str(copy)])
    check_file_of("treat", request.treat, request, checked)
    return checked


def _of_models(request: DiagnoseRequest) -> tuple[Diagnoses, Batch | None, Path | None]:
    """The diagnosis of each model on the text, by name."""
    seeds = request.seeds
    sources = find_models(request)
    opened = sources[0].opened
    has_loss = opened is None or opened.loss != "none"  # without one only some checks run
    if request.search is not None and seeds > 1:
        raise ConfigError(
            "--search and --seeds are given: a search has a half of the sequences to test what it"
            " finds on, so leave out --seeds"
        )
    if request.search is not None and "batch" not in request.typed:
        request = dataclasses.replace(request, batch=SEARCH_BATCH)
    batch = read_batch(request, sources, targets=has_loss, walks=seeds)
    directory = _directory(request)
    results: Diagnoses = {}
    segments = sum(source.segments for source in sources)
    with progress_bar("diagnose", 2 * seeds * segments) as advance:
        for i, source in enumerate(sources):
            repetitions = []
            for s in range(seeds):
                targets = None
                if batch.targets is not None:
                    targets = batch.targets[s::seeds]
                model = _drawn_anew(request, source, i, s).model(request)
                repetitions.append(
                    diagnose(
                        model,
                        batch.tokens[s::seeds],
                        targets,
                        weight_decay=request.weight_decay,
                        search=_search(request, source.name, advance),
                        progress=advance.of(source.name),
                    )
                )
            if seeds == 1:
                results[source.name] = repetitions[0]
            else:
                results[source.name] = merged(repetitions)
    return results, batch, directory


def _search(request: DiagnoseRequest, name: str, advance: Bar) -> SearchRequest | None:
    """The search that is asked for. The bar says how much of it is done."""
    if request.search is None:
        return None

    def progress(share: float) -> None:
        advance(f"{name}: search over edits, {share:.0%}", 0)

    return SearchRequest(request.search, progress)


def _check_weights_only(request: DiagnoseRequest) -> list[str]:
    """The options that only a run on a text takes. Raises ConfigError if one is given, and without
    a model of files.
    """
    kind: Any = type(request)  # a class is hashable, which mypy does not know
    about = options_of(kind)
    options_of_weights = (
        "named",
        "model",
        "checkpoint",
        "allow_pickle",
        "weights_only",
        "precision",
        "baseline",
        "fail_on",
        "sarif",
        "junit",
    )
    allowed = {*options_of_weights, *options_of(WrittenRequest)}
    for name in request.typed - allowed:
        if name in about:
            flag = about[name].flag(name)
        else:
            flag = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{flag} has no effect with --weights-only, which reads files of weights alone: leave"
            " out one of the two"
        )
    if not request.named_models:
        raise ConfigError(
            "--weights-only reads the weights of files, and no model is named: give a path as MODEL"
        )
    return [name for name in request.options if name not in allowed | request.unshown]


def _weights(request: DiagnoseRequest) -> dict[str, WeightReaders]:
    """The weights of each named model by its name in results."""
    return {name: checkpoint.weights for name, checkpoint in _checkpoints(request).items()}


def _checkpoints(request: DiagnoseRequest) -> dict[str, WeightsAndBuffers]:
    """The weights and buffers of each named model by its name in results."""
    paths = [Path(value) for _, value in request.named_models]
    if len(paths) == 1:
        names = [path.name or str(path) for path in paths]
    else:
        names = labels([str(path) for path in paths])
    return {
        name: read_checkpoint(path, allow_pickle=request.allow_pickle)
        for name, path in zip(names, paths, strict=True)
    }


def _of_weights(request: DiagnoseRequest) -> tuple[Diagnoses, Batch | None, Path | None]:
    """The diagnosis of the weights of each named model, by name."""
    models = _checkpoints(request)
    directory = _directory(request)
    total = sum(len(model.weights) + len(model.buffers) for model in models.values())
    with progress_bar("diagnose", total) as advance:
        results: Diagnoses = {}
        for (name, model), (_, value) in zip(models.items(), request.named_models, strict=True):
            results[name] = weight_diagnosis(
                model.weights,
                advance.of(name),
                model.buffers,
                family_directory(Path(value)),
                unread=model.unread,
                left_out=model.left_out,
                files=model.files,
                bare=Path(value) if without_config(Path(value)) else None,
                allow_pickle=request.allow_pickle,
            )
    return results, None, directory


def _changes(request: DiagnoseRequest, results: Diagnoses) -> dict[str, Change]:
    """What changed from the first of two models of files to the second; nothing for other
    models.
    """
    model_options = {option for option, _ in request.named_models}
    are_of_files = bool(model_options) and model_options <= {"model", "checkpoint"}
    if len(results) != 2 or not are_of_files:
        return {}
    (first, old), (second, new) = results.items()
    name = f"{first} to {second}"
    try:
        before, after = _weights(request).values()
    except ConfigError as error:
        return {name: Change([], {}, {"changes": str(error)})}
    if not before.keys() & after.keys():
        return {name: Change([], {}, {"changes": "no weight has the same name in both"})}
    with progress_bar("compare", len(after)) as advance:
        moved = updates(before, after, advance.of(name))
    old_readings = old.readings
    new_readings = new.readings
    if not request.weights_only:  # a pass over a text does not read all that the weights say
        old_readings = weight_diagnosis(before).readings | old_readings
        new_readings = weight_diagnosis(after).readings | new_readings
    return {name: change(old_readings, new_readings, moved)}


def _in_formats(request: DiagnoseRequest) -> dict[str, PrecisionDiagnosis]:
    """What the weights of each model would lose, by name and format."""
    if request.precision is None:
        return {}
    if not request.weights_only:
        raise ConfigError(
            "--precision reads weights of files: give --weights-only too, or use"
            " ctrans.low_precision in a training"
        )
    models = _weights(request)
    with progress_bar("round", sum(map(len, models.values()))) as advance:
        by_model = {
            name: weights_in(request.precision, weights, advance.of(name))
            for name, weights in models.items()
        }
    return {
        f"{name} to {number_format}": diagnosis
        for name, by_format in by_model.items()
        for number_format, diagnosis in by_format.items()
    }


def _drawn_anew(request: DiagnoseRequest, source: ModelSource, i: int, s: int) -> ModelSource:
    """The model; for repetition s > 0 of a seeded model, the same with seed + s."""
    seeded = not source.trained and source.opened is None
    if s and seeded:
        return find_models(dataclasses.replace(request, seed=request.seed + s))[i]
    return source
