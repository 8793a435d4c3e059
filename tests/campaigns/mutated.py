"""Whole files of every kind that ctrans reads, each damaged in one way. Each gets a line or an
answer.

A value is of another type, a key is removed or doubled; nesting, huge numbers and texts, characters
that control a terminal or a page, flipped bytes, a link or a pipe in the file's place.
"""

import dataclasses
import functools
import html.parser
import itertools
import json
import os
import random
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from ctrans.base.printable import UNSAFE
from ctrans.interop.families import FAMILIES
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.training.log import LOG
from ctrans.training.monitor.log import LOG as MONITORED
from tests.campaigns.damaged import MODEL, SETTINGS, TEXT
from tests.campaigns.harness import apart, ask
from tests.campaigns.hostile import LOOK, foreign
from tests.interop import plain_nanogpt

MARKUP = (
    "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e<img src=x"
    " onerror=alert(1)>\"'</script><script>alert(2)</script>`[red]$\\frac{{ 7*7 }}"
)
RAW = "@raw@"
NESTED = 400
ODD = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "one": "1",
    "half": "0.5",
    "a huge whole number": "1" + 400 * "0",
    "10^9": str(10**9),
    "a number of 5000 digits": 5000 * "9",
    "2^63": str(2**63),
    "1e400": "1e400",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "a denormal": "5e-324",
    "an empty text": '""',
    "a number as text": '"3"',
    "a huge text": json.dumps(100_000 * "x"),
    "markup": json.dumps(MARKUP),
    "a lone surrogate": '"\\ud800x"',
    "a null character": '"a\\u0000b"',
    "a line break": '"a\\nb\\r\\tc"',
    "a path": '"../../../../etc/passwd"',
    "a format": '"{0.__class__} %s %n"',
    "an empty list": "[]",
    "a list": "[1, [2, null], {}]",
    "a long list": json.dumps(20_000 * [0]),
    "an empty object": "{}",
    "an object": '{"a": {"b": 1}, "": 2, "__proto__": 3}',
    "nesting": NESTED * "[" + NESTED * "]",
    "deep nesting": 100_000 * '{"a":' + "1" + 100_000 * "}",
    "no JSON": "{",
    "a word": "None",
}
"""What stands in the place of a value, as JSON's text."""


def entries(value, path=()):
    """The paths of all entries of a JSON value, of long lists the first three."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:3])
        if isinstance(value, list)
        else ()
    )
    for key, entry in inside:
        yield (*path, key)
        yield from entries(entry, (*path, key))


def changed(value, draw):
    """The text of a JSON value in which one entry is another, removed, doubled or renamed, and what
    was done in words.
    """
    paths = list(entries(value))
    if not paths or draw.random() < 0.03:
        what = draw.choice(list(ODD))
        return ODD[what], f"all of it {what}"
    *above, last = draw.choice(paths)
    at = value = json.loads(json.dumps(value))
    for key in above:
        at = at[key]
    where = "/".join(map(str, (*above, last)))
    how = draw.choice(["replaced"] * 6 + ["removed", "doubled", "renamed", "added"])
    what = draw.choice(list(ODD))
    if how == "replaced" or isinstance(at, list):
        at[last] = RAW
        return (
            json.dumps(value).replace(json.dumps(RAW), ODD[what], 1),
            f"{where} replaced by {what}",
        )
    if how == "removed":
        del at[last]
        return json.dumps(value), f"{where} removed"
    if how == "renamed":
        at[MARKUP] = at.pop(last)
        return json.dumps(value), f"{where} renamed"
    at[RAW] = 0
    name = (
        last
        if how == "doubled"
        else draw.choice([MARKUP, "", "x", 5000 * "k", "__class__", "\ud800"])
    )
    return (
        json.dumps(value).replace(f"{json.dumps(RAW)}: 0", f"{json.dumps(name)}: {ODD[what]}", 1),
        f"{where} {how} as {what}",
    )


def of_json(data, draw):
    text, what = changed(json.loads(data), draw)
    return text.encode(), what


def of_lines(data, draw):
    """One line of a log changed, doubled, removed or cut."""
    lines = data.splitlines()
    k = draw.randrange(len(lines))
    how = draw.choice(["changed"] * 6 + ["doubled", "removed", "cut", "last first"])
    what = how
    if how == "changed":
        text, what = changed(json.loads(lines[k]), draw)
        lines[k] = text.encode()
    elif how == "doubled":
        lines[k:k] = 300 * [lines[k]]
    elif how == "removed":
        del lines[k]
    elif how == "cut":
        lines[k] = lines[k][: len(lines[k]) // 2]
    else:
        lines = lines[::-1]
    return b"\n".join(lines) + b"\n", f"line {k}: {what}"


def of_header(data, draw):
    """The header of a file of weights, whose length is made to fit."""
    length = int.from_bytes(data[:8], "little")
    text, what = changed(json.loads(data[8 : 8 + length]), draw)
    header = text.encode()
    size = (
        len(header) if draw.random() < 0.8 else draw.choice([0, 2**62, len(data), len(header) + 1])
    )
    return struct.pack("<Q", size) + header + data[8 + length :], f"header of {size}: {what}"


def of_toml(data, draw):
    """One line's value replaced, doubled or removed."""
    lines = data.decode().splitlines()
    k = draw.choice([k for k, line in enumerate(lines) if "=" in line])
    name = lines[k].partition("=")[0].strip()
    how = draw.choice(["replaced"] * 5 + ["doubled", "removed", "renamed", "added"])
    what = draw.choice(list(ODD))
    value = {"null": "inf", "NaN": "nan", "Infinity": "-inf", "a word": "1979-05-27"}.get(
        what, ODD[what].replace('{"a":', "{a=").replace(": ", "=")
    )
    if how == "removed":
        del lines[k]
    elif how == "doubled":
        lines.append(lines[k])
    elif how == "renamed":
        lines[k] = f"{json.dumps(MARKUP)} = 1"
    else:
        lines[k if how == "replaced" else slice(k, k)] = (
            f"{name} = {value}" if how == "replaced" else [f"x{k} = {value}"]
        )
    return "\n".join(lines).encode(errors="surrogatepass"), f"{name} {how} by {what}"


def of_bytes(data, draw):
    """Bytes cut, flipped, doubled, inserted, or the same text in another encoding."""
    how = draw.choice(
        [
            "cut",
            "flipped",
            "flipped",
            "flipped",
            "a few flipped",
            "inserted",
            "doubled",
            "utf-16",
            "utf-8-sig",
            "latin-1",
            "zeros",
            "swapped",
        ]
    )
    made = bytearray(data)
    at = draw.randrange(len(made))
    if how == "cut":
        made = made[:at]
    elif how == "flipped":
        made[at] ^= 1 << draw.randrange(8)
    elif how == "a few flipped":
        for _ in range(20):
            made[draw.randrange(len(made))] = draw.randrange(256)
    elif how == "inserted":
        made[at:at] = draw.choice(
            [
                b"\0",
                b"\x1b[2J",
                "\u202e".encode(),
                b"\xff\xfe",
                b"<script>",
                10_000 * b"9",
                5000 * b"[",
            ]
        )
    elif how == "doubled":
        made += bytes(made)
    elif how == "zeros":
        made[at:] = bytes(len(made) - at)
    elif how == "swapped":
        other = draw.randrange(len(made))
        made[at : at + 64], made[other : other + 64] = made[other : other + 64], made[at : at + 64]
    else:
        text = data.decode("latin-1" if how == "latin-1" else "utf-8", "replace")
        made = (
            text.replace("e", "\xe9").encode(how, "replace")
            if how == "latin-1"
            else text.encode(how, "replace")
        )
    return bytes(made), f"{how} at {at}"


def link(to):
    return lambda path: path.symlink_to(to)


def bound(path):
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 108 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


INSTEAD = {
    "nothing": lambda path: None,
    "an empty file": lambda path: path.touch(),
    "a loop": lambda path: path.symlink_to(path),
    "a link to nothing": link("/nothing/there"),
    "a link to zeros": link("/dev/zero"),
    "a link to memory": link("/proc/self/mem"),
    "a link to a directory": link("/proc"),
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": bound,
    "a sparse terabyte": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "a file of no permissions": lambda path: (path.write_bytes(b"{}"), path.chmod(0)),
}
"""What stands in the file's place."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Files that ctrans reads: `make` writes whole ones beneath a directory, of which `name` is
    damaged; `args` read them.
    """

    name: str
    make: Callable[[Path], None]
    args: Callable[[Path], list]
    change: Callable


def ours(place):
    save(GPT(GPTConfig(width=8, heads=2, depth=1, context=8)), place / "own")


def others(family):
    def make(place):
        foreign(place, family)
        words = {"[UNK]": 0, **{letter: k + 1 for k, letter in enumerate("abcdefghij .")}}
        none = dict.fromkeys(
            ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
        )
        made = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
        added = [
            {
                "id": 0,
                "content": "[UNK]",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ]
        splits = {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        }
        tokens = {
            "version": "1.0",
            "added_tokens": added,
            **none,
            "pre_tokenizer": splits,
            "model": made,
        }
        (place / "model/tokenizer.json").write_text(json.dumps(tokens))
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "[UNK]",
            "model_max_length": 32,
            "clean_up_tokenization_spaces": True,
        }
        (place / "model/tokenizer_config.json").write_text(json.dumps(about))
        (place / "model/generation_config.json").write_text(
            json.dumps({"max_new_tokens": 3, "temperature": 0.5, "eos_token_id": [1, 2]})
        )

    return make


def shape(family):
    """A family's config alone."""

    def make(place):
        entry = FAMILIES[family]
        config = getattr(transformers, entry.config)(**entry.settings)
        (place / "config.json").write_text(
            json.dumps(
                {
                    **config.to_dict(),
                    "model_type": config.model_type,
                    "architectures": [entry.model],
                }
            )
        )
        np.save(place / "ids.npy", np.arange(1, 13))

    return make


TOML = """name = "small"
task = "text"
learning_rates = [1e-3, 1e-2]
seeds = [0]
budget = 0.1
measure = ["moments"]

[base]
width = 8
heads = 2
depth = 1
context = 8
batch = 2
iterations = 2
placement = "pre"

[vary]
dt = [1.0, 0.5]
norm = ["layernorm"]
"""


def toml(place):
    (place / "small.toml").write_text(TOML)


def anatomy(place):
    foreign(place)
    (place / "parts.toml").write_text(
        'blocks = "transformer.h"\nattention = "attn"\nffn = ["mlp"]\n'
    )


def trained(place):
    """A run with a monitor's log."""
    place = place.resolve()
    (place / "text").write_bytes(TEXT)
    settings = {**MODEL, **SETTINGS, "file": place / "text", "out": place / "run"}
    options = [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    answer = ask(["train", *options, "--monitor", "--every", "2"])
    assert answer.code == 0, answer.said


def result(*args):
    def make(place):
        answer = ask(
            [
                *args,
                "--depth",
                "1",
                "--width",
                "8",
                "--heads",
                "2",
                "--context",
                "8",
                "--batch",
                "1",
                "--json",
                str(place / "r.json"),
            ]
        )
        assert answer.code in (0, 1), answer.said

    return make


def verified(place):
    assert (
        ask(["verify", "--cases", "1", "--only", "lemma-1", "--json", str(place / "r.json")]).code
        == 0
    )


def nanogpt(place):
    torch.save({"model": plain_nanogpt.weights(), "model_args": {"n_head": 2}}, place / "ckpt.pt")
    np.save(place / "ids.npy", np.arange(8))


def arrays(place):
    ours(place)
    np.save(place / "ids.npy", np.arange(20))


def reported(place):
    return ["report", place / "r.json", "--out", place / "page"]


def watched(place):
    return [
        "watch",
        place / "run",
        "--once",
        "--out",
        place / "seen",
        "--html",
        place / "seen.html",
    ]


def resumed(place):
    return ["train", "--resume", "--out", place / "run"]


def of_shape(place):
    return [*LOOK, "--architecture", place / "config.json", "--ids", place / "ids.npy"]


def with_text(place):
    return [*LOOK, "--model", place / "model", "--text", "abc def abc"]


def own(place):
    return [*LOOK, "--checkpoint", place / "own", "--html", place / "page.html"]


KINDS = [
    Kind("own/config.json", ours, own, of_json),
    Kind("own/model.safetensors", ours, own, of_header),
    *(
        Kind("model/config.json", others(name), with_text, of_json)
        for name in ("gpt2", "llama", "bert")
    ),
    Kind("model/model.safetensors", others("gpt2"), with_text, of_header),
    Kind("model/generation_config.json", others("gpt2"), with_text, of_json),
    *(
        Kind(f"model/{name}", others("gpt2"), with_text, of_json)
        for name in ("tokenizer.json", "tokenizer_config.json")
    ),
    *(Kind("config.json", shape(family), of_shape, of_json) for family in FAMILIES),
    Kind(
        "small.toml",
        toml,
        lambda place: ["study", place / "small.toml", "--report", "--out", place / "study"],
        of_toml,
    ),
    Kind(
        "parts.toml",
        anatomy,
        lambda place: [*foreign_look(place), "--anatomy", place / "parts.toml"],
        of_toml,
    ),
    Kind(f"run/{LOG}", trained, resumed, of_lines),
    Kind(
        "run/train.json",
        trained,
        lambda place: ["report", place / "run/train.json", "--out", place / "page"],
        of_json,
    ),
    Kind(f"run/{MONITORED}", trained, watched, of_lines),
    Kind(f"run/{MONITORED}", trained, watched, of_lines),
    *(
        Kind("r.json", result(*args), reported, of_json)
        for args in (
            ("simulate",),
            ("diagnose", "--placement", "pre"),
            ("screen", "--quick"),
            ("hjb-check",),
            ("control", "--placement", "peri"),
        )
    ),
    Kind("r.json", verified, reported, of_json),
    Kind(
        "ckpt.pt",
        nanogpt,
        lambda place: [*LOOK, "--model", place, "--ids", place / "ids.npy"],
        of_bytes,
    ),
    Kind(
        "ids.npy",
        arrays,
        lambda place: [*LOOK, "--checkpoint", place / "own", "--ids", place / "ids.npy"],
        of_bytes,
    ),
]
WIDE = [kind for kind in KINDS if kind.name != "config.json"]
"""Kinds that are drawn half of the time; the families' configs are the other half."""


def foreign_look(place):
    return [*LOOK, "--model", place / "model", "--ids", place / "ids.npy"]


def drawn(count, seed):
    """So many cases: a kind, and the number of its damage. Each kind comes with everything that may
    stand in its file's place.
    """
    draw = random.Random(seed)
    instead = list(itertools.product(range(len(KINDS)), INSTEAD))
    draw.shuffle(instead)
    cases = [
        (KINDS.index(draw.choice(WIDE if draw.random() < 0.5 else KINDS)), k)
        for k in range(count - min(len(instead), count // 5))
    ]
    return [*cases, *instead[: count - len(cases)]]


@functools.cache
def whole():
    """A directory of this process with whole files of every kind, and the names of tags and the
    most scripts of whole pages.

    A copy of this process makes them, which differentiates.
    """
    kept = tempfile.TemporaryDirectory()
    makes = [
        functools.partial(_made, kind, Path(kept.name) / str(number))
        for number, kind in enumerate(KINDS)
    ]
    for (_, how, said), kind in zip(apart(makes, seconds=600), KINDS, strict=True):
        assert how is None, f"{kind.name}: {how}: {said}"
    pages = [Tags(path.read_text()) for path in Path(kept.name).rglob("*.html")]
    return kept, set().union(*(page.names for page in pages)), max(page.scripts for page in pages)


def _made(kind, place):
    place.mkdir(parents=True)
    kind.make(place)
    if kind.name not in ("config.json", "small.toml"):  # models of images, a study without runs
        answer = ask([str(arg) for arg in kind.args(place)])
        assert answer.code == 0, answer.said
        assert not answer.faults, answer.said


def made_in(case, seed, place):
    """The request that reads that case's files, which are made there from whole ones, and the
    damage in words.
    """
    number, which = case
    kind = KINDS[number]
    shutil.copytree(Path(whole()[0].name) / str(number), place, symlinks=True)
    for page in place.rglob("*.html"):
        page.unlink()
    path = place / kind.name
    data = path.read_bytes()
    path.unlink()
    if which in INSTEAD:
        INSTEAD[which](path)
        what = which
    else:
        draw = random.Random(f"{seed} {number} {which}")
        change = kind.change if draw.random() < 0.75 else of_bytes
        data, what = change(data, draw)
        path.write_bytes(data)
    return [
        str(arg) for arg in kind.args(place)
    ], f"{kind.name} of kind {number}, case {which}, {what}"


class Tags(html.parser.HTMLParser):
    """The names of a page's tags and attributes, its scripts, and its policy."""

    def __init__(self, page):
        super().__init__()
        self.names, self.scripts, self.policy = set(), 0, ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names |= {tag, *(f"{tag} {name}" for name, _ in attrs)}
        self.scripts += tag == "script"
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]


def faults_of_pages(place):
    """What is wrong with the pages beneath a directory."""
    _, names, scripts = whole()
    for path in place.rglob("*.html"):
        page = path.read_text("utf-8", "surrogateescape")
        tags = Tags(page)
        if not (
            "default-src 'none'" in tags.policy
            and "unsafe-inline" not in tags.policy.partition("script-src")[2].partition(";")[0]
        ):
            yield f"{path.name}: its policy is {tags.policy!r}"
        if more := tags.names - names or (tags.scripts > scripts):
            yield f"{path.name}: more than its own tags: {more}"
        if UNSAFE.search(page):
            yield f"{path.name}: control characters {UNSAFE.findall(page)[:5]}"
