"""`ctrans screen`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import click
from rich.table import Table
from torch import Tensor

from ctrans.cli import options
from ctrans.cli.ending import CommandEnding, directory_of, end
from ctrans.cli.reading import Batch, LookedAt, Pictures, Text, read
from ctrans.cli.request import MODEL_OPTIONS, ModelRequest, get_device, get_dtype, takes
from ctrans.cli.subjects import Subject, find, seeded, settle_threads
from ctrans.fields import ACTIVATIONS, ATTENTIONS, EXPERTS, FFNS, POSITIONS, QK_NORMS, ROUTERS
from ctrans.model.architectures import ARCHITECTURES, GROUPS, PLAIN, differences
from ctrans.model.initialisation import INITIALISATIONS
from ctrans.norm import NORMS
from ctrans.report.axes import MOST_LINES
from ctrans.report.diagnosis_report import first_findings, summary
from ctrans.report.files import png
from ctrans.report.progress import Bar, progress_bar
from ctrans.report.screen_figure import screen_figure
from ctrans.report.screen_report import (
    KEY,
    NAMES_APART,
    by_verdict,
    comparison_tables,
    label,
    overview_table,
    rate_words,
    rates_table,
    screen_reasons,
    screen_table,
)
from ctrans.residual import RESIDUALS
from ctrans.stability.diagnosis.quantities import QUANTITIES
from ctrans.stability.screening.screen import EFFORTS, Screening, screen
from ctrans.weights.on_demand import watch
from solvers import ConfigError
from solvers.errors import look_up

ValuesOf = Callable[[str], list[Any]]


SWITCH = {"no": False, "yes": True}


def _names(table: dict[str, Any], what: str) -> ValuesOf:
    return lambda text: options.expand(text.split(","), table, what)


def _numbers(kind: type[int] | type[float], what: str) -> ValuesOf:
    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise ConfigError(f"--compare {what}={text}: give numbers with commas between them, such as {what}=1,2") from None

    return parse


def _numbers_or_none(kind: type[int] | type[float], what: str) -> ValuesOf:
    """Numbers, and "none" for the setting left out."""
    numbers = _numbers(kind, what)
    return lambda text: [part if part == "none" else numbers(part)[0] for part in text.split(",")]


def _unless_none(value: Any) -> Any:
    return None if value == "none" else value


def _alone(value: Any) -> Any:
    return (value,)


def _itself(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Comparable:
    """What can be compared: the field of a request that it changes, how its values are read, and how the field holds one."""

    field: str
    values: ValuesOf
    as_field: Callable[[Any], Any] = _itself


COMPARABLE: dict[str, Comparable] = {
    "placement": Comparable("placements", lambda text: options.expand_placements(text.split(",")), _alone),
    "norm": Comparable("norms", _names(NORMS, "norm"), _alone),
    "residual": Comparable("residual", _names(RESIDUALS, "residual")),
    "parallel-blocks": Comparable("parallel_blocks", _names(SWITCH, "parallel-blocks"), SWITCH.__getitem__),
    "branch-norms": Comparable("branch_norms", _names(SWITCH, "branch-norms"), SWITCH.__getitem__),
    "dt": Comparable("dt", _numbers(float, "dt")),
    "attention": Comparable("attention", _names(ATTENTIONS, "attention")),
    "ffn": Comparable("ffn", _names(FFNS, "ffn")),
    "activation": Comparable("activation", _names(ACTIVATIONS, "activation")),
    "positions": Comparable("positions", _names(POSITIONS, "positions")),
    "kv-heads": Comparable("kv_heads", _numbers_or_none(int, "kv-heads"), _unless_none),
    "window": Comparable("window", _numbers_or_none(int, "window"), _unless_none),
    "qk-norm": Comparable("qk_norm", _names({"none": None, **QK_NORMS}, "qk-norm"), lambda name: name != "none" and name),
    "norm-groups": Comparable("norm_groups", _numbers_or_none(int, "norm-groups"), _unless_none),
    "norm-alpha": Comparable("norm_alpha", _numbers_or_none(float, "norm-alpha"), _unless_none),
    "norm-radius": Comparable("norm_radius", _numbers_or_none(float, "norm-radius"), _unless_none),
    "softcap": Comparable("softcap", _numbers_or_none(float, "softcap"), _unless_none),
    "sinks": Comparable("sinks", _names(SWITCH, "sinks"), SWITCH.__getitem__),
    "gated-output": Comparable("gated_output", _names(SWITCH, "gated-output"), SWITCH.__getitem__),
    "experts": Comparable("experts", _numbers(int, "experts")),
    "top-k": Comparable("top_k", _numbers(int, "top-k")),
    "shared-experts": Comparable("shared_experts", _numbers(int, "shared-experts")),
    "router": Comparable("router", _names(ROUTERS, "router")),
    "expert": Comparable("expert", _names(EXPERTS, "expert")),
    "init": Comparable("initialisation", _names(INITIALISATIONS, "initialisation")),
    "embedding-std": Comparable("embedding_std", _numbers(float, "embedding-std")),
    "depth": Comparable("depth", _numbers(int, "depth")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScreenRequest(ModelRequest):
    """What `screen` is asked: `compare` has texts such as "dt=1,0.1"."""

    compare: tuple[str, ...]
    quick: bool

    compares = True
    unshown: ClassVar[frozenset[str]] = ModelRequest.unshown | {"compare", "quick"}


@click.command("screen")
@options.several_models
@options.placements_option("peri")
@options.architecture_options
@click.option(
    "--compare",
    multiple=True,
    metavar="NAME=V,V",
    help=f"Repeatable: every combination of the values. {options.one_of(COMPARABLE).capitalize()}; names also take all. Or architectures "
    "by name, which differ from plain pre-LN, with commas between them: all, modern, or as in llama,mixtral,post:swiglu:dt=0.1 "
    f"some of {', '.join(ARCHITECTURES)}, and settings as above, joined by colons.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Seconds instead of minutes: fewer tokens, layers and certificates, wider tolerances; no curvature or spectrum.",
)
@options.text_options
@options.device_options
@options.model_options
@options.out_option("screen")
@options.json_option
@takes(ScreenRequest)
def command(request: ScreenRequest) -> None:
    """Screen an architecture before it is trained, or a model that there is.

    Kan's four steps: is training a well-posed control problem, how do hidden states grow, how do gradients pass, how far does
    uncertainty travel. Beside them attention sensitivity, what one optimiser step does, and initialisation theory. Every quantity
    has limits on both sides, outside of which a model does nothing or explodes. A step that cannot handle the model says so. The
    directory gets screen.json and screen.png.

    \b
    ctrans screen --placement pre --quick
    ctrans screen --placement all --compare dt=1,0.1 --quick
    ctrans screen --compare modern --quick
    ctrans screen --compare pre,llama,mixtral,post:swiglu:dt=0.1 --quick
    ctrans screen out/train --file book.txt
    ctrans screen run/step-1000 run/step-2000 --quick
    ctrans screen models/gpt2 --quick --dtype float32
    ctrans screen --architecture llama-70b --depth 8 --tokens 32 --quick
    """
    _check_dtype(request.dtype)
    device, dtype = get_device(request.device), get_dtype(request.dtype)
    jobs = _jobs(request)
    found = list(jobs.values())
    text = read(request, found)
    tokens, targets, other = (part.to(device) for part in _parts(text, request, found))
    settle_threads(found, tokens, get_dtype(request.dtype))
    directory = directory_of(request)
    effort = EFFORTS["quick" if request.quick else "full"]
    results: dict[str, Screening] = {}
    with progress_bar("screen", sum(map(_visits, found))) as advance:
        for name, subject in jobs.items():
            model = subject.model(dtype, device)
            watch(model, partial(_under_way, advance, name))
            told = partial(_told, advance, name)
            results[name] = screen(
                model, tokens, targets, effort, other=other, seed=request.seed, trained=subject.trained, progress=told
            )
    if len(results) > MOST_LINES:
        results = by_verdict(results)
    ending = CommandEnding(
        options={"placements": _placements(found), "compare": request.compare, "quick": request.quick},
        looked_at=LookedAt(request, found, text, tokens),
        device=device,
        result={
            "quantities": {name: dataclasses.asdict(quantity) for name, quantity in QUANTITIES.items()},
            "models": {name: _summary(screening) for name, screening in results.items()},
        },
        files={"screen.png": lambda: png(screen_figure(results, _title(found)))},
        page=_page(results),
        failures=[
            f"{name}: activations become non-finite in segment {screening.broken}"
            for name, screening in results.items()
            if screening.broken is not None
        ],
    )
    end(request, directory, ending)


def _visits(subject: Subject) -> int:
    """How often its screening tells its progress, known before it is made: every segment, there and back."""
    return 2 * subject.segments


def _told(advance: Bar, name: str, step: str) -> None:
    advance(f"{name}, {step}")


def _under_way(advance: Bar, name: str, piece: str) -> None:
    """A step takes minutes where weights are made on demand."""
    advance.say(f"{name}, weights of {piece}")


def _jobs(request: ScreenRequest) -> dict[str, Subject]:
    """Every model by name: whatever can be wrong is said before anything is computed."""
    axes = _axes(request.compare)
    saved = _named(request)
    if axes and saved is not None:
        raise ConfigError(f"--{saved} brings its own architecture: leave out --compare, or leave out --{saved}")
    if "placements" in request.typed and "placement" in axes:
        raise ConfigError("placements are given twice: choose one of --placement and --compare placement=...")
    if saved is not None:
        return {subject.name: subject for subject in find(request)}
    named = _architectures(request)
    first = {"placement": options.expand_placements(request.placements)} if "placements" in request.typed or not named else {}
    axes = {**first, **axes}
    jobs = {}
    for values in itertools.product(*axes.values()):
        changes = list(zip(axes, values, strict=True))
        changed: dict[str, Any] = {COMPARABLE[name].field: COMPARABLE[name].as_field(value) for name, value in changes}
        other = dataclasses.replace(request, **changed)
        if len(options.expand(other.norms, NORMS, "norm")) > 1:
            raise ConfigError(
                "--norm all stands for several norms, and one is looked at in each model: choose one, or --compare norm=..."
            )
        for name, fields in named.items():
            base = {} if "placement" in axes else PLAIN
            jobs[", ".join(filter(None, (name, label(changes))))] = seeded(other, {**base, **fields})
        if not named:
            (jobs[label(changes)],) = find(other)
    return jobs


def _architectures(request: ScreenRequest) -> dict[str, dict[str, Any]]:
    """What differs from plain pre-LN in each architecture that is asked for by name."""
    texts = [part for text in request.compare if not _is_axis(text) for part in text.split(",")]
    names = dict.fromkeys(name for text in texts for name in GROUPS.get(text, [text]))
    return {name: _fields(name, request.depth) for name in names}


def _fields(text: str, blocks: int) -> dict[str, Any]:
    """The fields of `GPTConfig` that a text such as "llama:dt=0.1" sets."""
    fields: dict[str, Any] = {}
    for part in text.split(":"):
        name, equals, value = part.partition("=")
        if not equals:
            fields |= differences(name, blocks)
            continue
        setting = look_up("setting to compare", name, COMPARABLE)
        values = setting.values(value)
        if len(values) > 1:
            raise ConfigError(f"--compare {text}: {name} has {len(values)} values, and an architecture has one: give one")
        # a request has several placements and norms, an architecture one of each
        several = setting.as_field is _alone
        fields[setting.field.removesuffix("s") if several else setting.field] = (
            values[0] if several else setting.as_field(values[0])
        )
    return fields


def _is_axis(text: str) -> bool:
    """Whether it is a setting with its values, and not architectures by name."""
    return "=" in text and ":" not in text and "," not in text.partition("=")[0]


def _named(request: ScreenRequest) -> str | None:
    """The option that names a model, or the first of several."""
    return request.several[0][0] if request.several else next((o for o in MODEL_OPTIONS if getattr(request, o) is not None), None)


def _placements(found: Sequence[Subject]) -> list[str]:
    """Each placement that a sublayer of these models has."""
    return list(dict.fromkeys(name for subject in found for name in subject.placements))


def _axes(compare: Sequence[str]) -> dict[str, list[Any]]:
    axes: dict[str, list[Any]] = {}
    for text in filter(_is_axis, compare):
        name, _, values = text.partition("=")
        if name in axes:
            raise ConfigError(
                f"--compare {name} is given twice, of which one alone would count: give all its values with commas between them"
            )
        axes[name] = look_up("setting to compare", name, COMPARABLE).values(values)
    return axes


def _check_dtype(name: str) -> None:
    if name == "bfloat16":
        raise ConfigError("dtype 'bfloat16' is too coarse for singular values and certificates: choose float32 or float64")


def _parts(text: Text | Pictures | Batch, request: ScreenRequest, found: Sequence[Subject]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets, and as many tokens of another text: every second sequence."""
    shortest = min(subject.context for subject in found)
    tokens, targets = text.pairs(request.batch, shortest, 2)
    return tokens[::2], targets[::2], tokens[1::2]


def _title(found: Sequence[Subject]) -> str:
    if any(subject.label is not None for subject in found):
        return f"Screening: {len(found)} models"
    return f"Screening, width {found[0].width}" if len(found) > 1 else f"Screening: {found[0].title}"


def _summary(screening: Screening) -> dict[str, Any]:
    findings = {name: {**vars(finding), "flags": finding.flags} for name, finding in screening.findings.items()}
    return {**vars(screening), "flags": screening.flags, "findings": findings}


def _page(results: Mapping[str, Screening]) -> list[str | Table]:
    """One model with its reasons, or several beside each other, step by step."""
    ((name, first), *others) = results.items()
    if len(others) >= MOST_LINES:  # a page of words for each would bury the tables
        return [
            overview_table(results),
            "",
            rates_table(results),
            "",
            *(part for table in comparison_tables(results) for part in (table, "")),
            KEY,
            "",
        ]
    if others:
        opening = [
            part
            for name, each in results.items()
            for part in (
                summary(name, each.diagnosis),
                *([] if each.diagnosis.healthy else [first_findings(each.diagnosis)]),
                "",
            )
        ]
        tables = [*comparison_tables(results), rates_table(results)]
        return [*opening, *(part for table in tables for part in (table, "")), NAMES_APART, KEY, ""]
    return [
        first_findings(first.diagnosis),
        "",
        screen_table(name, first),
        "",
        screen_reasons(first),
        rate_words(first),
        "",
        KEY,
        "",
    ]
