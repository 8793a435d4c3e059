"""What a hostile or strange file may do: cost little, be refused in a line, and write nothing raw
to a terminal or a page.
"""

import ast
import dataclasses
import functools
import html.parser
import importlib
import inspect
import io
import json
import operator
import os
import random
import resource
import struct
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from ctrans.base.given_files import read_toml
from ctrans.base.memory import memory
from ctrans.base.printable import UNSAFE, printable
from ctrans.measure.measured import Answer, Measured
from ctrans.model.checkpoint import load, save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.size import check_buildable, number_of_weights
from ctrans.model.weights_file import read_weights, safetensors_bytes
from ctrans.report.contents import page_of
from ctrans.report.html import render
from ctrans.report.terminal import show
from solvers import ConfigError
from tests.campaigns.harness import ask
from tests.campaigns.hostile import (
    LOOK,
    architecture,
    config,
    edit,
    file_in,
    ours_in,
    safetensors_header,
)

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e<img src=x"
    " onerror=alert(1)>\"'</script>`[red]$\\frac\ud800"
)
HUGE_HEADER = {
    f"w{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)
}


def refused(make, place):
    """The line in which a request is refused, in a second and 100 MB; imports come first."""
    args = [str(arg) for arg in make(place)]
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    answer = ask(args, refused=True)
    assert not answer.faults, answer.said
    assert answer.code == 2
    assert time.process_time() - started < 2, answer.said  # a second, on a machine of its own
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, answer.said
    return answer.error


@pytest.mark.parametrize("make", [config, architecture])
@pytest.mark.parametrize(
    "entries", [{"num_labels": 3 * 10**8}, {"text_config": {"num_labels": 3 * 10**8}}]
)
def test_a_config_of_many_labels_is_refused_before_they_are_named(make, entries, tmp_path):
    importlib.import_module("ctrans.cli.simulate")
    assert "num_labels = 300,000,000: the largest allowed number is 100,000" in refused(
        make(**entries), tmp_path
    )


@pytest.mark.parametrize("what", [ours_in, file_in])
def test_a_large_header_of_weights_is_refused_before_it_is_parsed(what, tmp_path):
    error = refused(what("model.safetensors", safetensors_header(HUGE_HEADER)), tmp_path)
    assert "its header has" in error
    assert "at most 1,048,576 are allowed" in error


def test_a_header_is_measured_against_its_own_file(tmp_path):
    save(GPT(GPTConfig(width=8, heads=2, depth=1, context=8)), tmp_path)
    read_weights(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1000) + b"{}")
    with pytest.raises(ConfigError, match="its header has 1,000 bytes, and at most 2 are allowed"):
        read_weights(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["context", "vocab_size", "width"])
def test_a_config_of_more_weights_than_its_file_has_makes_no_model(name, tmp_path):
    """Files of before the digest have none, which is why sizes are compared too."""
    save(GPT(GPTConfig(width=8, heads=2, depth=1, context=8)), tmp_path)
    weights, _ = read_weights(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(weights, {}))
    load(tmp_path)
    edit(tmp_path / "config.json", **{name: 8192})
    with pytest.raises(
        ConfigError, match=r"does not fit its config.json, which describes [\d,]+ weights"
    ):
        load(tmp_path)


def test_buffers_count_as_memory(tmp_path):
    entries = {
        "model_type": "gpt_neo",
        "num_layers": 2,
        "attention_types": [[["global"], 2]],
        "hidden_size": 8,
        "num_heads": 2,
    }
    (tmp_path / "a.json").write_text(
        json.dumps({**entries, "vocab_size": 9, "max_position_embeddings": 10**6})
    )
    error = refused(lambda place: [*LOOK, "--architecture", place / "a.json"], tmp_path)
    assert "the buffers need" in error


@pytest.mark.parametrize(
    "options", [["--window", "100"], ["--positions", "alibi"], ["--softcap", "30"]]
)
def test_a_request_is_refused_before_more_than_the_memory_is_allocated(options, tmp_path):
    """The masks and scores of 450,000 tokens have 200 GB and more."""
    small = [
        "simulate",
        "--context",
        "3000000",
        "--depth",
        "1",
        "--width",
        "16",
        "--positions",
        "rotary",
        *options,
    ]
    assert "the weights and one sublayer's activations for 4 sequences of" in refused(
        lambda place: small, tmp_path
    )


def test_what_is_refused_is_what_does_not_fit(tmp_path, monkeypatch):
    """Either side of the threshold: the mask of 2,000 tokens as scores of 8 bytes for 2 heads, and
    the weights.
    """
    config = GPTConfig(width=8, heads=2, depth=1, context=2000, softcap=30.0)
    size = number_of_weights(config) * 8 + 3 * 2 * 2000**2 * 8
    for there, fits in ((size - 1, False), (size, True)):
        monkeypatch.setattr("ctrans.base.memory.memory", lambda there=there: there)
        monkeypatch.setattr("ctrans.model.size.memory", lambda there=there: there)
        with (
            nullcontext()
            if fits
            else pytest.raises(ConfigError, match="lower --batch, --context or --width")
        ):
            check_buildable(config, 0, shape=(3, 2000), dtype=torch.float64)


@pytest.mark.parametrize("limit", ["3000000000\n", "max\n"])
def test_the_limit_of_a_control_group_counts_as_memory(limit, tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(limit)
    whole = memory()
    monkeypatch.setattr("ctrans.base.memory.LIMITS", (tmp_path / "memory.max", tmp_path / "none"))
    assert memory() == (min(whole, 3 * 10**9) if limit[0] == "3" else whole)


def test_a_file_is_read_within_the_address_space_that_a_process_has():
    """Half of the machine's memory was reserved to read a few bytes."""
    code = (
        "import resource; from pathlib import Path; from ctrans.base.given_files import read_file;"
        " from ctrans.base.memory import memory\npages ="
        " int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize() + (64 <<"
        " 20)\nresource.setrlimit(resource.RLIMIT_AS, (pages, resource.RLIM_INFINITY)); assert"
        f" memory() == pages\nprint(len(read_file(Path({str(ROOT / 'README.md')!r}))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.strip() == str((ROOT / "README.md").stat().st_size), done.stderr


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    1.5,
    10**30,
    float("nan"),
    "",
    "x",
    HOSTILE,
    [],
    [0],
    [[1]],
    {},
    {"0": [0]},
    "float64",
]
"""Values of wrong and unusual types for a config's entries."""
ENTRIES = [
    *(
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "torchscript",
        "use_cache",
        "chunk_size_feed_forward",
    ),
    *(
        "is_encoder_decoder",
        "architectures",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "dtype",
        "torch_dtype",
    ),
    *(
        "tie_word_embeddings",
        "pruned_heads",
        "name_or_path",
        "_name_or_path",
        "transformers_version",
        "per_layer_config",
    ),
    *(
        "use_return_dict",
        "is_decoder",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "tokenizer_class",
        "prefix",
    ),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "task_specific_params",
    ),
    *(
        "rope_scaling",
        "rope_parameters",
        "gradient_checkpointing",
        "attn_implementation",
        "finetuning_task",
        "sub_configs",
    ),
]
"""Entries that every config of `transformers` may have, now or in an earlier version, beside those
of the installed one.
"""


def entries_of_any_config():
    from transformers import PretrainedConfig

    here = {
        *vars(PretrainedConfig()),
        *(field.name for field in dataclasses.fields(PretrainedConfig)),
    }
    properties = {
        name
        for name in dir(PretrainedConfig)
        if isinstance(getattr(PretrainedConfig, name), property)
    }
    return sorted({*ENTRIES, *here, *properties})


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_an_entry_of_any_type_gets_a_line_or_an_answer(count, tmp_path, capfd):
    seed = 2026
    draws = random.Random(seed)
    pairs = [(name, value) for name in entries_of_any_config() for value in VALUES]
    for name, value in [("return_dict", False), ("torchscript", True), *draws.sample(pairs, count)]:
        make = draws.choice([config, architecture])
        answer = ask([str(arg) for arg in make(**{name: value})(tmp_path)])
        assert not answer.faults, f"seed {seed}, {name} = {value!r}: {answer.said}"
        assert "\x1b" not in answer.out + answer.error + "".join(capfd.readouterr())


def test_a_config_that_changes_how_outputs_are_returned_changes_no_figure(tmp_path):
    plain = json.loads(ask([str(arg) for arg in config()(tmp_path)]).out)["placements"]
    odd = json.loads(
        ask([str(arg) for arg in config(return_dict=False, output_attentions=True)(tmp_path)]).out
    )["placements"]
    (one,), (other,) = plain.values(), odd.values()
    assert one["rms"] == other["rms"]


@pytest.mark.parametrize(
    "entries",
    [
        {"num_key_value_heads": 3},
        {"model_type": "mistral", "sliding_window": 0},
        {"sliding_window": 10**30},
    ],
)
def test_an_architecture_that_does_not_run_gets_a_line(entries, tmp_path):
    own = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    kind = {"model_type": "mistral"} if "sliding_window" in entries else {}
    (tmp_path / "a.json").write_text(json.dumps({**own, **kind, "vocab_size": 256, **entries}))
    (tmp_path / "ids.txt").write_text(" ".join(map(str, range(20))))
    answer = ask(
        [*LOOK, "--architecture", str(tmp_path / "a.json"), "--ids", str(tmp_path / "ids.txt")],
        refused=True,
    )
    assert not answer.faults, answer.said
    assert answer.code == 2
    assert "does not run" in answer.error or "makes no model" in answer.error


def test_unsafe_characters_are_escaped_and_all_other_text_stays():
    assert printable("a\x1b[2J\x9b\u202eb\ud800\x7f\r") == "a\\x1b[2J\\x9b\\u202eb\\ud800\\x7f\\r"
    kept = "tab\t line\n Größe 模型 مرحبا 👩‍👧 �"
    assert printable(kept) == kept
    assert not UNSAFE.search(printable("".join(map(chr, range(0x11000)))))


def test_commands_print_by_one_function():
    printing = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ctrans").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "click.echo", "click.secho", "sys.stdout.write")
    }
    assert printing == {"ctrans/cli/say.py"}


def test_names_in_weights_reach_no_terminal_raw(tmp_path):
    held = {HOSTILE.replace("\ud800", ""): {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}
    text = json.dumps(held).encode()
    for what in (ours_in, file_in):
        args = what(
            "model.safetensors",
            lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8)),
        )(tmp_path)
        answer = ask([str(arg) for arg in args], refused=True)
        assert not answer.faults, answer.said
        assert not UNSAFE.search(answer.error)


class Tags(html.parser.HTMLParser):
    """Counts the elements of a page, and keeps its attributes and the policy."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.policy = [], set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]


def with_text(value, change):
    """The JSON value with all its own text changed, except what ctrans itself looks up."""
    if isinstance(value, dict):
        return {
            name: each
            if name in ("command", "status", "severity", "mark")
            else with_text(each, change)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [with_text(each, change) for each in value]
    return (
        change(value) if isinstance(value, str) and value not in ("inf", "-inf", "nan") else value
    )


@pytest.mark.parametrize("command", ["simulate", "other"])
def test_a_page_of_hostile_text_has_the_tags_of_the_same_page_with_plain_text(command, tmp_path):
    small = ["--width", "8", "--heads", "2", "--depth", "1", "--context", "8"]
    result = {**json.loads(ask(["simulate", *small, "--json", "-"]).out), "command": command}
    pages = []
    for text in ("plain", HOSTILE.replace("`", "")):
        changed = with_text(
            result, lambda old, text=text: old if old.startswith(("peri", "pre")) else text
        )
        changed["options"][text] = [1, text]
        changed["environment"] = {text: text}
        pages.append(render(page_of({f"{text}.json": changed})))
        (tmp_path / "r.json").write_text(json.dumps(changed))
        answer = ask(
            ["report", str(tmp_path / "r.json"), "--out", str(tmp_path / "report"), "--verbose"]
        )
        assert not answer.faults, answer.said
        assert answer.code == 0
        assert not UNSAFE.search(answer.out)
        assert (tmp_path / "report" / "report.html").read_text("utf-8")
    plain, hostile = map(Tags, pages)
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert not UNSAFE.search(pages[1])
    assert "script-src 'sha256-" in hostile.policy
    assert "default-src 'none'" in hostile.policy
    assert "unsafe-inline" not in hostile.policy.partition("script-src")[2]


@pytest.mark.parametrize(
    "text", ["a = " + 5_000 * "[", 5_000 * "a.", "a = 1" + 9_000_000 * " ", "\x00", "a = \ud800"]
)
def test_a_hostile_toml_is_refused_in_a_line(text, tmp_path):
    path = tmp_path / "hostile.toml"
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(
        ConfigError, match=r"is no TOML|it has 9,000,005 bytes|is nested more than 100 deep"
    ) as refusal:
        read_toml(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"window": 10**400}},
        {"model": {"width": -(10**400)}},
        {"options": [1]},
        {"environment": "x"},
        {"model": 3},
        {"options": {"depth": "\ud800"}},
        {"command": "\ud800"},
    ],
)
def test_a_report_of_odd_json_has_a_line_or_a_page(changes, tmp_path):
    result = json.loads(
        ask(
            [
                "simulate",
                "--width",
                "8",
                "--heads",
                "2",
                "--depth",
                "1",
                "--context",
                "8",
                "--json",
                "-",
            ]
        ).out
    )
    (tmp_path / "r.json").write_text(json.dumps({**result, **changes}))
    answer = ask(["report", str(tmp_path / "r.json"), "--out", str(tmp_path / "out")])
    assert not answer.faults, answer.said
    assert (answer.code == 0) == (tmp_path / "out" / "report.html").exists()


STRANGE_VALUES = ("inf", "nan", "x", True, None, {}, [], {"a": 1}, ["x"], "1e3", -5)


def leaves(value, path=()):
    """The paths of all entries, of lists the first two."""
    yield path
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    for key, entry in entries:
        yield from leaves(entry, (*path, key))


@pytest.mark.parametrize("command", ["simulate", "diagnose", "hjb-check", "control"])
def test_a_result_with_one_strange_value_is_refused_or_shown(command):
    """Random entries of a result have a value of another type. `page_of` refuses what no page and
    no terminal can show.
    """
    small = [
        "--placement",
        "pre",
        "--width",
        "8",
        "--heads",
        "2",
        "--depth",
        "1",
        "--context",
        "8",
        "--batch",
        "1",
    ]
    written = ask([command, *small, "--json", "-"]).out
    paths = [path for path in leaves(json.loads(written)) if path and path[0] != "environment"]
    drawn = random.Random(0)
    for _ in range(40):
        result, (*above, last), value = (
            json.loads(written),
            drawn.choice(paths),
            drawn.choice(STRANGE_VALUES),
        )
        functools.reduce(operator.getitem, above, result)[last] = value
        try:
            page = page_of({"r": result})
        except ConfigError:
            continue
        show(page, Console(file=io.StringIO(), width=100), verbose=True)
        render(page)


def test_a_step_that_its_dtype_cannot_hold_ends_in_a_line():
    answer = ask(
        [
            "control",
            "--placement",
            "peri",
            "--dtype",
            "float32",
            "--dt",
            "1e39",
            "--width",
            "8",
            "--depth",
            "1",
            "--json",
            "-",
        ]
    )
    assert not answer.faults, answer.said
    assert answer.code in (0, 1, 2)


@pytest.mark.parametrize("placement", ["post", "pre_post", "deepnorm"])
def test_a_model_whose_gains_are_zero_is_screened(placement, tmp_path):
    model = GPT(GPTConfig(width=8, heads=2, depth=2, context=8, placement=placement))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.zero_()
    save(model, tmp_path)
    answer = ask(["screen", "--checkpoint", str(tmp_path), "--json", "-"])
    assert not answer.faults, answer.said
    assert answer.code == 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.tokens, self.blocks, self.head = (
            nn.Embedding(20, 8),
            nn.ModuleList([layer]),
            nn.Linear(8, 20),
        )

    def forward(self, x):
        return self.head(self.blocks[0](self.tokens(x)))


STRANGE_MODULES = """
def line(module):
    try:
        return open_model(module).described
    except ConfigError as error:
        return str(error)

with torch.device("meta"):
    meta = Model()
with torch.inference_mode():
    inference = Model()
cyclic = Model()
cyclic.blocks[0].linear1.back = cyclic
print(*map(line, (meta, inference, cyclic)), sep="\\n")
"""


def test_modules_without_numbers_or_ends_get_a_line():
    """In a process of its own: the suite's look at models before and after knows no such
    modules.
    """
    begin = (
        "import torch\nfrom torch import nn\nfrom ctrans.interop.open_model import open_model\nfrom"
        " solvers import ConfigError\n"
    )
    code = begin + inspect.getsource(Model) + STRANGE_MODULES
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    meta, inference, _ = done.stdout.splitlines()
    assert "on the meta device" in meta
    assert "in inference mode" in inference


def test_a_training_whose_stdout_is_closed_goes_on(tmp_path):
    options = (
        "--depth 1 --width 16 --heads 2 --context 8 --iterations 90 --warmup 5 --eval-every 45"
        " --eval-windows 1 --out run"
    )
    done = closed(f"train {options}", tmp_path, begin="ulimit -n 64; ")
    assert (done.returncode, done.stderr.count("ctrans:")) == (0, 0), done.stderr
    assert json.loads((tmp_path / "run/train.json").read_text())["step"] == 90


def test_a_closed_stdout_gets_a_line(tmp_path):
    save(GPT(GPTConfig(width=8, heads=2, depth=1, context=8)), tmp_path / "own")
    done = closed("generate --checkpoint own --tokens 3", tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "ctrans: stdout is closed: redirect it to a file or a pipe\n",
    )


def closed(command, directory, begin=""):
    """The command with its stdout closed."""
    return subprocess.run(
        f"{begin}{sys.executable} -m ctrans {command} >&-",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("mark", ["evil", HOSTILE, None, [], {"bad": 1}])
def test_an_answer_with_an_unknown_mark_is_refused_with_the_marks_that_there_are(mark, tmp_path):
    """A mark chooses the class of an element of the page, and the style in a terminal."""
    table = Measured(answers=(Answer("All is well."),)).as_json()
    table["answers"][0]["mark"] = mark
    (tmp_path / "r.json").write_text(json.dumps({"command": "simulate", "measured": table}))
    out = tmp_path / "report"
    answer = ask(["report", str(tmp_path / "r.json"), "--out", str(out)], refused=True)
    assert not answer.faults, answer.said
    assert answer.code == 2
    assert "Measured.answers[0].mark = " in answer.error
    assert "is not '' or 'bad' or 'note' or 'good': make the result anew" in answer.error
    assert not out.exists()
