"""Parsers to fuzz: table TARGETS. A new parser is one entry: what reads the bytes, and the first
bytes to change.

A reading may end well or in ConfigError or SolveError. A fault is any other exception, over
`SECONDS` or `BYTES`, raw control characters in what is printed, or an answer that differs from an
independent reader's (an assertion). `fuzzing.py` drives them, by coverage.
"""

import contextlib
import dataclasses
import functools
import html.parser
import importlib
import importlib.util
import inspect
import io
import json
import pickle
import re
import sqlite3
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import safetensors.torch
import torch
from rich.console import Console

from ctrans.base.given_files import read_json
from ctrans.base.option import options_of
from ctrans.base.printable import UNSAFE
from ctrans.cli import COMMANDS
from ctrans.cli.comparison import architectures_of, axes_of
from ctrans.cli.plugins import function_of, import_named
from ctrans.cli.request import request_of
from ctrans.cli.watch import findings
from ctrans.dynamics.placement import spell
from ctrans.examine.comparison.recording import read_recording
from ctrans.interop.anatomy import read_anatomy
from ctrans.interop.architecture import skeleton
from ctrans.interop.distributed_checkpoint import distributed_weights
from ctrans.interop.hugging_face_files import weight_files
from ctrans.interop.image_inputs import images_for
from ctrans.interop.nanogpt import read_nanogpt
from ctrans.interop.stored_weights import stored_weights
from ctrans.interop.tokens import read_ids
from ctrans.measure.findings import Finding
from ctrans.model.checkpoint import load, save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.sums import OPTIMISER, damage, sums
from ctrans.model.weights_file import read_weights, safetensors_bytes
from ctrans.report.contents import page_of
from ctrans.report.files import to_json
from ctrans.report.html import render
from ctrans.report.terminal import show
from ctrans.study import database
from ctrans.study.description import PlannedRun
from ctrans.study.export import as_csv
from ctrans.study.study_file import read_study
from ctrans.study.training import RunResult
from ctrans.training import log
from ctrans.training.monitor.log import LogWriter, read_log
from ctrans.training.monitor.log_lines import Header, Report
from ctrans.training.run_checkpoint import optimiser_tensors, restore
from ctrans.training.settings import TrainConfig
from ctrans.training.training_state import Progress, State, read_state
from solvers import ConfigError, SolveError
from tests.campaigns.harness import ask
from tests.interop import plain_nanogpt

SECONDS, BYTES = 60, 2 << 30
"""No reading takes longer, or more memory."""
ROOT = Path(__file__).parents[2]
MODEL = GPTConfig(width=8, heads=2, depth=1, context=8, vocab_size=16)


@dataclasses.dataclass(frozen=True)
class Target:
    """A parser. `read(data, place)` reads the bytes, by files that it writes to the place, which
    stays the same. `seeds` makes the first bytes. `form` is what they hold: json, lines (of JSON),
    header (safetensors), text or bytes.
    """

    read: Callable[[bytes, Path], object]
    seeds: Callable[[], list]
    form: str


TARGETS = {}


def target(form, seeds):
    def enrol(read):
        TARGETS[read.__name__] = Target(
            read,
            lambda: [each if isinstance(each, bytes) else each.encode() for each in seeds()],
            form,
        )
        return read

    return enrol


def fault_of(name, data, place):
    """What is wrong with the reading of these bytes, in words that are the same for the same fault;
    None for nothing.
    """
    started, printed = time.process_time(), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(action="ignore"),
        ):
            TARGETS[name].read(data, place)
    except (ConfigError, SolveError, click.ClickException) as error:
        if not str(
            error if not isinstance(error, click.ClickException) else error.format_message()
        ).strip():
            return "an error without words"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            frame
            for frame in frames
            if "/ctrans/" in frame.filename or "/solvers/" in frame.filename
        ]
        where = (own or frames)[-1]
        said = (
            re.sub(r"[\d.]+", "N", str(error).partition("\n")[0][-200:])
            if isinstance(error, AssertionError)
            else ""
        )
        return (
            f"{type(error).__name__}: {said} at {Path(where.filename).name}, {where.name}:"
            f" {where.line}"
        )
    if time.process_time() - started > SECONDS:
        return f"over {SECONDS} seconds"
    return "control characters are printed" if UNSAFE.search(printed.getvalue()) else None


def written(place, name, data):
    (place / name).write_bytes(data)
    return place / name


def once(place, name, make):
    """Makes it there the first time."""
    if not (place / name).exists():
        make(place / name)
    return place / name


@functools.cache
def weights_bytes():
    """Weights without a digest of their config, so that any config may be beside them."""
    with tempfile.TemporaryDirectory() as place:
        save(GPT(MODEL), place)
        return safetensors_bytes(read_weights(Path(place) / "model.safetensors")[0], {})


def settings_of(cls, **changes):
    return json.dumps(
        {
            **{
                f.name: f.default
                for f in dataclasses.fields(cls)
                if f.default is not dataclasses.MISSING
            },
            **changes,
        }
    )


@target(
    "json",
    lambda: [
        json.dumps(dataclasses.asdict(dataclasses.replace(MODEL, **c)))
        for c in ({}, {"norm": "rmsnorm", "dt": 0.1})
    ],
)
def config(data, place):
    """Our config.json."""
    once(place, "model.safetensors", lambda path: path.write_bytes(weights_bytes()))
    written(place, "config.json", data)
    model = load(place)
    said = json.loads(data)
    assert {name: getattr(model.config, name) for name in said} == said


FAMILIES = [
    *(
        "gpt2",
        "llama",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "mistral",
        "phi",
        "phi3",
        "gpt_neox",
        "gpt_neo",
        "opt",
    ),
    *(
        "bert",
        "roberta",
        "mixtral",
        "qwen3_moe",
        "t5",
        "bart",
        "bloom",
        "falcon",
        "stablelm",
        "cohere",
        "starcoder2",
        "granite",
        "gptj",
    ),
]


def family_configs():
    small = {
        "vocab_size": 16,
        "hidden_size": 8,
        "n_embd": 8,
        "num_hidden_layers": 1,
        "n_layer": 1,
        "num_attention_heads": 2,
        "n_head": 2,
    }
    other = {
        "intermediate_size": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "head_dim": 4,
        "pad_token_id": 0,
    }
    own = {
        "gpt_neo": {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
        "t5": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
        "bart": {
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        },
        "opt": {"ffn_dim": 8, "word_embed_proj_dim": 8},
        "gptj": {"rotary_dim": 2},
    }
    return [
        json.dumps({"model_type": name, **small, **other, **own.get(name, {})}) for name in FAMILIES
    ]


@target("json", family_configs)
def family(data, place):
    """A config.json of transformers, asked by its command."""
    ids = once(place, "ids.npy", lambda path: np.save(path, np.arange(12) % 3))
    path = written(place, "config.json", data)
    if sum(parameter.numel() for parameter in skeleton(path).parameters()) > 10**5:
        return
    asked = ["simulate", "--no-reference", "--context", "4", "--batch", "1", "--json", "-"]
    answer = ask([*asked, "--architecture", str(path), "--ids", str(ids)])
    assert not answer.faults, "; ".join(answer.faults)[-200:]
    assert not UNSAFE.search(answer.error)


def headers():
    half = {
        "a": torch.arange(3.0).half(),
        "b.c": torch.eye(2, dtype=torch.bfloat16),
        "d": torch.zeros(0, 2, dtype=torch.float64),
    }
    return [
        weights_bytes(),
        safetensors.torch.save(half, {"format": "pt"}),
        safetensors.torch.save({"n": torch.arange(3)}),
    ]


def plainly(data):
    """The tensors of a safetensors file by the format's words alone: name to dtype, shape and
    bytes.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    entries.pop("__metadata__", None)
    return {
        name: (
            each["dtype"],
            tuple(each["shape"]),
            data[end + each["data_offsets"][0] : end + each["data_offsets"][1]],
        )
        for name, each in entries.items()
    }


NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


@target("header", headers)
def weights(data, place):
    """A safetensors file, read at once and by its header."""
    path = written(place, "model.safetensors", data)
    with contextlib.suppress(ConfigError):
        stored = {name: (each.dtype, each.shape) for name, each in stored_weights([path]).items()}
        assert stored == {name: (dtype, shape) for name, (dtype, shape, _) in plainly(data).items()}
    held, metadata = read_weights(path)
    assert all(isinstance(text, str) for pair in metadata.items() for text in pair)
    expected = plainly(data)
    assert held.keys() == expected.keys()
    for name, value in held.items():
        dtype, shape, content = expected[name]
        assert tuple(value.shape) == shape
        assert NAMES.get(value.dtype, dtype) == dtype
        assert value.contiguous().flatten().view(torch.uint8).numpy().tobytes() == content


def recordings():
    """The recorded states of a small model."""
    states = {f"state.{k}": torch.zeros(1, 2, 4) for k in range(3)}
    ids = torch.zeros(1, 2, dtype=torch.int64)
    return [safetensors.torch.save({"tokens": ids, "logits": torch.zeros(1, 2, 5), **states})]


@target("header", recordings)
def recording(data, place):
    """A recording for `ctrans compare`."""
    found = read_recording(written(place, "port.safetensors", data))
    assert len({x.shape for x in found.states}) == 1
    assert all(x.is_floating_point() for x in found.states)


@target(
    "json",
    lambda: [
        json.dumps(
            {
                "metadata": {"total_size": 9},
                "weight_map": {"a": "a.safetensors", "b": "b.safetensors"},
            }
        )
    ],
)
def index(data, place):
    """An index of shards: what it names are files here."""
    written(place, "model.safetensors.index.json", data)
    for name in weight_files(place):
        assert (place / name).parent == place
        assert Path(name).name == name


@target("bytes", lambda: [pickle.dumps(distributed_metadata(), protocol) for protocol in (2, 4)])
def distributed(data, place):
    """The metadata of a distributed checkpoint: what they name are files here."""
    written(place, ".metadata", data)
    assert all(weight.path == place for weight in distributed_weights(place).values())


def distributed_metadata():
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    held = {"w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2]), [chunk])}
    return Metadata(held, storage_data={MetadataIndex("w", [0]): _StorageInfo(".metadata", 0, 99)})


STUDIES = [
    """
name = "s"
seeds = [0, 1]
learning_rates = [1e-3, 1e-2]
budget = 2.0
file = "b.txt"
measure = ["gradient_growth"]
[base]
depth = 2
[vary]
placement = ["pre", "peri"]
dt = [1.0, 0.1]
[[cases]]
norm = "rmsnorm"
[[cases]]
norm = "layernorm"
""",
    'task = "digits"\nseeds = [3]\n[vary]\nwidth = [8, 16]\n',
    'bin = "d"\n[base]\nresidual = "plain"\nlow_rank = 0\n',
]


@target("text", lambda: STUDIES)
def study(data, place):
    """A study's TOML: what it says is what the study has."""
    made = read_study(written(place, "s.toml", data))
    said = tomllib.loads(data.decode())
    for name in ("name", "base", "vary", "cases", "learning_rates", "seeds", "measure", "budget"):
        if name in said:
            assert getattr(made, name) == said[name]
    assert len(made.runs()) == made.count


@target("text", lambda: ['blocks = "model.layers"\nattention = "attn"\nffn = ["up", "down"]\n'])
def anatomy(data, place):
    """The TOML of --anatomy."""
    made = read_anatomy(written(place, "a.toml", data))
    assert {
        name: value for name, value in dataclasses.asdict(made).items() if value is not None
    } == tomllib.loads(data.decode())


def rows_of_log():
    rows = [
        {"step": 0, "validation_loss": 3.5, "growth": 1.0, "largest": 2.0},
        {
            "step": 1,
            "loss": 3.0,
            "learning_rate": 1e-3,
            "gradient_norm": 1.0,
            "temperature": 1.0,
            "tokens_per_second": 9.0,
        },
        {"step": 1, "settings": {"iterations": 9}},
        {
            "step": 2,
            "loss": 2.0,
            "learning_rate": 1e-3,
            "gradient_norm": "inf",
            "validation_loss": 2.5,
            "growth": 1.0,
            "largest": 2.0,
        },
        {"step": 3, "diverged": "loss nan"},
    ]
    return [
        "".join(json.dumps(row) + "\n" for row in rows),
        '{"step": 0, "validation_loss": 3}\n{"st',
    ]


def shown(page):
    """The page in a terminal and as HTML, which has no raw control character, and no tag or
    attribute from data.
    """
    terminal = io.StringIO()
    show(page, Console(file=terminal, width=100), verbose=True)
    assert not UNSAFE.search(terminal.getvalue()), "control characters in the terminal"
    made = render(page)
    assert not UNSAFE.search(made), "control characters in the page"
    assert not (odd := Tags(made).odd), f"a tag or attribute from data: {sorted(odd)}"


class Tags(html.parser.HTMLParser):
    """The elements and attributes of a page that our pages do not have."""

    ELEMENTS = frozenset(
        re.findall(r"<([a-z]\w*)", (ROOT / "ctrans" / "report" / "page.html.j2").read_text())
    ) | {"code"}

    def __init__(self, page):
        super().__init__()
        self.odd = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        names = {
            name
            for name, _ in attrs
            if name.startswith("on") or name in ("src", "srcset", "formaction", "srcdoc")
        }
        links = {
            value
            for name, value in attrs
            if name == "href" and not (value or "").startswith(("#", "data:,"))
        }
        self.odd |= names | links | ({tag} - self.ELEMENTS)


@target("lines", rows_of_log)
def run_log(data, place):
    """The log of a training, read, averaged and cut."""
    written(place, log.LOG, data)
    rows = list(log.read(place))
    lines = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]
    own = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            own.append(json.loads(line))
    own = [row for row in own if isinstance(row, dict)]
    assert all(any(same(row, other) for other in own) for row in rows)
    log.unsaved(place)
    log.curves(rows)
    log.cut(place, 2)
    assert all(row["step"] <= 2 for row in log.read(place))


def same(a, b):
    return json.dumps(a) == json.dumps(b)


def monitor_logs():
    with tempfile.TemporaryDirectory() as place:
        writer = LogWriter(
            Path(place),
            Header(
                "a model, 1 block", ["0 attention", "0 ffn"], ["attention", "ffn"], [2, 0], 1, 9
            ),
        )
        for step in (1, 2):
            writer.report(
                Report(
                    step,
                    {
                        "loss": 3.0,
                        "gradient_norm": 1.0,
                        "rms": [1.0, 2.0],
                        "update_ratio": [0.1, 0.2],
                    },
                    {"0": "why"},
                )
            )
        fields = {field.name: "x" for field in dataclasses.fields(Finding)}
        finding = {
            **fields,
            "severity": "serious",
            "value": 3.0,
            "places": [],
            "since": 1,
            "doubling": 2.0,
            "crossing": 3,
        }
        writer._add({"step": 2, "finding": finding})
        writer.probe(2, {"sharpness": 2.0, "unknown": {"a": "b"}})
        writer.end(2, "finished")
        made = (Path(place) / "monitor.jsonl").read_bytes()
    old = {
        "rule": "x",
        "grade": "danger",
        "says": "loss",
        "value": 3.0,
        "limit": 2.0,
        "place": "0",
        "does": "d",
        "helps": "h",
    }
    return [
        made,
        made.splitlines(keepends=True)[0] + json.dumps({"step": 3, "alarm": old}).encode() + b"\n",
    ]


@target("lines", monitor_logs)
def monitor_log(data, place):
    """A monitor's log: watched, and gone on with."""
    written(place, "monitor.jsonl", data)
    found = read_log(place)
    shown(page_of({"watch": json.loads(to_json({"command": "watch", **findings(found)}))}))
    writer = LogWriter(place, found.header, start=2)
    writer.report(Report(3, {"loss": 1.0}))
    assert read_log(place).steps[-1:] == [3]


SMALL = [
    "--width",
    "8",
    "--heads",
    "2",
    "--depth",
    "1",
    "--context",
    "4",
    "--batch",
    "1",
    "--json",
    "-",
]


def results():
    asked = [
        *([command, *SMALL] for command in ("simulate", "diagnose", "control", "hjb-check")),
        ["screen", "--quick", *SMALL],
        [
            "coordinate-check",
            "--widths",
            "8",
            "--widths",
            "16",
            "--updates",
            "1",
            *SMALL[2:8],
            "--json",
            "-",
        ],
        ["verify", "--cases", "1", "--only", "lemma-1", "--json", "-"],
    ]
    said = [ask(args).out for args in asked]
    return [json.dumps(json.loads(each)) for each in said if each.startswith("{")]


@target("json", results)
def result(data, place):
    """A result as `report` reads it."""
    shown(page_of({"r": read_json(written(place, "r.json", data))}))


def stored_runs():
    run = PlannedRun(MODEL, TrainConfig(iterations=2), {"placement": "pre"})
    curve = [
        {"step": 0, "validation_loss": 3.0},
        {"step": 2, "loss": 2.0, "gradient_norm": 1.0, "validation_loss": 2.5},
    ]
    done = RunResult(
        "finished",
        "2 iterations done",
        curve,
        1.0,
        {"torch": "2"},
        {"asked": [], "before": {}, "after": {}},
    )
    return run, done


def make_store(directory):
    run, done = stored_runs()
    with database.open_store(directory) as store:
        store.tell("study", {"name": "s"})
        store.begin_on({8: "f"})
        store.add([(run.key("f"), run, done)], "c")


def used(directory):
    """All that is read of a store, which no command lets pass without a word on each damaged
    row.
    """
    with database.open_store(directory, write=False) as store:
        for each in store.runs():
            assert each.losses is not None, each.best
            assert each.run.case is not None
        keys = [each.key for each in store.runs()]
        (
            store.known(store.data()),
            store.spent(keys),
            store.about("study"),
            as_csv(*store.table_of_runs(keys)),
        )


def database_rows():
    with tempfile.TemporaryDirectory() as place:
        make_store(Path(place))
        with contextlib.closing(sqlite3.connect(Path(place) / database.FILE)) as held:
            held.row_factory = sqlite3.Row
            (row,) = [dict(row) for row in held.execute("SELECT * FROM runs")]
    row.pop("digest")
    return [
        json.dumps({**row, "data": "{}"}),
        json.dumps({**row, "data": '{"8": "f"}', "learning_rate": None, "message": "x"}),
    ]


@target("json", database_rows)
def study_row(data, place):
    """The columns of a run and the fingerprints of the data, as a store of format 1 has them,
    without digests.
    """
    try:
        row = json.loads(data)
        row = {
            name: json.dumps(value) if isinstance(value, (list, dict)) else value
            for name, value in row.items()
        }
    except (ValueError, RecursionError, AttributeError):
        return
    (place / database.FILE).unlink(missing_ok=True)
    fingerprints = row.pop("data", "{}")
    quoted = {name.lower(): '"' + name.replace('"', '""') + '"' for name in row}
    with contextlib.closing(sqlite3.connect(place / database.FILE)) as held, held:
        try:
            held.execute("CREATE TABLE about (name, value)")
            held.execute(f"CREATE TABLE runs ({', '.join(quoted.values()) or 'x'})")
            held.execute("INSERT INTO about VALUES ('format', '1'), ('data', ?)", (fingerprints,))
            held.execute(
                f"INSERT INTO runs VALUES ({', '.join('?' * len(row)) or 'NULL'})", [*row.values()]
            )
        except (sqlite3.Error, UnicodeEncodeError, OverflowError):
            return  # SQLite itself has no such row
    used(place)


def database_files():
    with tempfile.TemporaryDirectory() as place:
        make_store(Path(place))
        return [(Path(place) / database.FILE).read_bytes()]


@target("bytes", database_files)
def study_file(data, place):
    """The bytes of study.sqlite."""
    written(place, database.FILE, data)
    used(place)


@target("json", lambda: [state_bytes()])
def state(data, place):
    """train.json."""
    read = read_state(Path(written(place, "train.json", data)).parent)
    said = json.loads(data)
    assert {name: getattr(read.progress, name) for name in said["progress"]} == said["progress"]
    read.write(place)
    assert read_state(place) == read or "nan" in data.decode().lower()


def state_bytes():
    with tempfile.TemporaryDirectory() as place:
        State(
            Progress(2, 3.0, 2.5, 2, 0, 2),
            TrainConfig(iterations=4),
            {"file": "b", "bin": None},
            "f",
        ).write(Path(place))
        return (Path(place) / "train.json").read_bytes()


@functools.cache
def trained():
    model = GPT(MODEL)
    optimiser = TrainConfig().make_optimiser(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    return model, optimiser


@target("header", lambda: [safetensors.torch.save(optimiser_tensors(*trained()))])
def optimiser_file(data, place):
    """The optimiser's tensors."""
    model, _ = trained()
    written(place, OPTIMISER, data)
    own = TrainConfig().make_optimiser(model.parameters())
    restore(place, model, own)
    own.step()


def lines_of_sums():
    return ["{}  config.json\n{}  model.safetensors\n".format(64 * "0", 64 * "1")]


@target("text", lines_of_sums)
def sums_file(data, place):
    """SHA256SUMS: only the right ones are found right."""
    once(place, "config.json", lambda path: path.write_text("{}"))
    written(place, "SHA256SUMS", data)
    assert (damage(place) is None) == (data == sums(place))


def option_texts():
    """A request by command: an option in each line, all with a value that it may have."""
    kept = []
    for name in COMMANDS:
        command = importlib.import_module(f"ctrans.cli.{name.replace('-', '_')}").command
        options = [option for option in command.params if isinstance(option, click.Option)]
        values = {
            option.opts[0]: option.default if isinstance(option.default, str) else 1
            for option in options
            if not option.is_flag
        }
        kept.append("\n".join([name, *(f"{flag}={value}" for flag, value in values.items())]))
        kept += [f"{name}\n{flag}=1" for flag in values]
    texts = [
        "placement=post/pre",
        "post*3+pre*9",
        "dt=1,0.1",
        "llama:dt=0.1",
        "norm=rmsnorm,layernorm",
        "width=8,none",
    ]
    return kept + [f"screen\n--compare={text}\n--placement={text}" for text in texts]


@target("text", option_texts)
def options(data, place):
    """Values of options: the request is made, and its architecture, but not carried out."""
    name, *args = data.decode(errors="surrogateescape").split("\n")
    if name not in COMMANDS:
        return
    command = importlib.import_module(f"ctrans.cli.{name.replace('-', '_')}").command
    if {"--help", "--help-all", "-h", "--version"} & set(args) or any(
        word in data for word in (b"--python", b"--example", b"--loss", b"--device")
    ):
        return
    held = inspect.getclosurevars(inspect.unwrap(command.callback)).nonlocals
    with command.make_context(name, args, max_content_width=100) as context:
        request = request_of(held["kind"], context)
    if isinstance(getattr(request, "config", None), dict):
        known = {
            name: value for name, value in request.config.items() if name in options_of(GPTConfig)
        }
        GPTConfig(**known)
    compared = getattr(request, "compare", ())
    axes_of(compared), architectures_of(compared, 2)
    for text in getattr(request, "placements", ()):
        if text != "all":
            assert spell(spell(text)) == spell(text)


@target(
    "text",
    lambda: [
        "my.py",
        "a/b.py:f",
        "os.path:join",
        "json:loads",
        "none_such.part:f",
        "x:y:z",
        ":f",
        "a:",
    ],
)
def plugin(data, place):
    """Names of plugins and of functions. Of what is installed, only modules without effects are
    imported.
    """
    once(place, "my.py", lambda path: path.write_text("def f():\n    return 1\n"))
    text = data.decode(errors="surrogateescape")
    top = text.split(":")[0].split(".")[0]
    try:
        installed = (
            bool(top)
            and "/" not in top
            and "\0" not in top
            and importlib.util.find_spec(top) is not None
        )
    except (ValueError, ImportError, OSError):
        installed = False
    if installed and top not in ("json", "os"):
        return
    with contextlib.chdir(place):
        for read in (import_named, function_of):
            with contextlib.suppress(ConfigError, click.ClickException):
                read(text)


def checkpoints_of_nanogpt():
    made = []
    for args in (
        {"n_head": 2},
        {"n_head": 2, "dropout": 0.1},
        {"n_head": 2, "cts": True, "steps": 3},
    ):
        held = io.BytesIO()
        torch.save({"model": plain_nanogpt.weights(), "model_args": args}, held)
        made.append(held.getvalue())
    return made


@target("bytes", checkpoints_of_nanogpt)
def nanogpt(data, place):
    """nanoGPT's ckpt.pt."""
    read_nanogpt(written(place, "ckpt.pt", data))


def arrays():
    made = []
    for array in (
        np.arange(5),
        np.arange(4, dtype="<u2"),
        np.zeros((2, 3, 4, 4), "u1"),
        np.zeros((2, 3, 4, 4), "f4"),
    ):
        held = io.BytesIO()
        np.save(held, array)
        made.append(held.getvalue())
    return made


@target("bytes", arrays)
def array(data, place):
    """An array of ids, or of images."""
    path = written(place, "a.npy", data)
    with contextlib.suppress(ConfigError):
        assert np.array_equal(read_ids(path), np.load(io.BytesIO(data), allow_pickle=False))
    images_for(path, (3, 4, 4), torch.float32).batch(1)


def pictures():
    from PIL import Image

    made = []
    for kind, mode in (
        ("png", "RGB"),
        ("png", "L"),
        ("png", "P"),
        ("jpeg", "RGB"),
        ("bmp", "RGB"),
        ("webp", "RGB"),
    ):
        held = io.BytesIO()
        Image.new(mode, (5, 3)).save(held, kind)
        made.append(held.getvalue())
    return made


@target("bytes", pictures)
def picture(data, place):
    """An image file."""
    kinds = {b"\x89": "png", b"\xff": "jpg", b"B": "bmp", b"R": "webp"}
    (place / "p").mkdir(exist_ok=True)
    for path in (place / "p").iterdir():
        path.unlink()
    written(place / "p", f"a.{kinds.get(data[:1], 'png')}", data)
    x = images_for(place / "p", (3, 4, 4), torch.float32).batch(1)
    assert x.isfinite().all()


@target("json", lambda: ['{"image_mean": [0.5, 0.4, 0.3], "image_std": 0.2}'])
def prepared(data, place):
    """preprocessor_config.json."""
    once(place, "a.npy", lambda path: np.save(path, np.ones((2, 3, 4, 4), "u1")))
    written(place, "preprocessor_config.json", data)
    x = images_for(place / "a.npy", (3, 4, 4), torch.float64, place).batch(1)
    said = json.loads(data)
    mean = said.get("image_mean") if said.get("image_mean") is not None else 0.5
    deviation = said.get("image_std") if said.get("image_std") is not None else 0.5
    expected = (1 / 255 - np.broadcast_to(mean, 3).astype(float)) / np.broadcast_to(
        deviation, 3
    ).astype(float)
    assert np.allclose(x[0, :, 0, 0], expected, equal_nan=True)
