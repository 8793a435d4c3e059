"""Files made to harm: each with the request that reads it, which has to be refused in a line, at
once, with nothing run or read outside.
"""

import json
import os
import pickle
import shutil
import struct
import zipfile

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from tests.campaigns.harness import Runs
from tests.interop import plain_nanogpt
from tests.interop.models import made

LOOK = ["simulate", "--no-reference", "--context", "4", "--batch", "1", "--json", "-"]
CODE = "import pathlib\npathlib.Path({marker!r}).touch()\nclass Own: pass\n"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def foreign(place, name="gpt2"):
    """A library's small model, with token ids beside it."""
    transformers.utils.logging.disable_progress_bar()
    made(name).save_pretrained(place / "model")
    np.save(place / "ids.npy", np.arange(20))
    return place / "model", [*LOOK, "--model", place / "model", "--ids", place / "ids.npy"]


def config(**changes):
    """A foreign config with these entries changed."""

    def make(place):
        directory, args = foreign(place)
        edit(directory / "config.json", **changes)
        return args

    return make


def architecture(**changes):
    """The same without weights."""

    def make(place):
        directory, _ = foreign(place)
        edit(directory / "config.json", **changes)
        return [*LOOK, "--architecture", directory / "config.json"]

    return make


def own_code(named, **changes):
    """A config whose classes are in a file beside it, which leaves a mark when it is run."""

    def make(place):
        directory, args = foreign(place)
        (directory / "own.py").write_text(CODE.format(marker=str(place / "was_run")))
        kept = json.loads((directory / "config.json").read_text()) | {"auto_map": named, **changes}
        (directory / "config.json").write_text(
            json.dumps({name: value for name, value in kept.items() if value is not None})
        )
        return args

    return make


def index(*names):
    """An index of shards that lie elsewhere."""

    def make(place):
        directory, args = foreign(place)
        (directory / "model.safetensors").rename(place / "outside.safetensors")
        weights = {f"weight.{i}": name.format(place=place) for i, name in enumerate(names)}
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weights})
        )
        return args

    return make


def tokenizer(**parts):
    """A tokenizer of a few words, with a part that runs away."""

    def make(place):
        directory, args = foreign(place)
        words = {"[UNK]": 0, "a": 1}
        model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
        none = dict.fromkeys(
            ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
        )
        (directory / "tokenizer.json").write_text(
            json.dumps({"version": "1.0", "added_tokens": [], **none, "model": model, **parts})
        )
        return [*args[:-2], "--text", 40 * "a" + "!"]

    return make


def doubling(times):
    """A rule that makes every letter 2^times letters."""
    return {
        "type": "Sequence",
        "normalizers": times * [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}],
    }


BACKTRACKING = (
    "(a+)+$",
    "(a|a)*$",
    "(a|aa)+$",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "(.*a){30}$",
    "(?:a{0,4000}){0,4000}$",
)


def recording(states=None, **changes):
    """A foreign model beside recorded states, with these tensors in the place of right ones."""

    def make(place):
        directory, _ = foreign(place)
        entries = json.loads((directory / "config.json").read_text())
        count = 2 * entries["n_layer"] + 1 if states is None else states
        tensors = {f"state.{k}": torch.zeros(1, 8, entries["n_embd"]) for k in range(count)}
        tensors |= {"tokens": torch.arange(8)[None], **changes}
        save_file(tensors, place / "recorded.safetensors")
        return ["compare", place / "recorded.safetensors", directory, "--json", "-"]

    return make


def file_in(name, write):
    """A foreign model in which that file is replaced."""

    def make(place):
        directory, args = foreign(place)
        (directory / name).unlink(missing_ok=True)
        write(directory / name)
        return args

    return make


def ours_in(name, write):
    """A checkpoint of ours in which that file is replaced."""

    def make(place):
        save(GPT(GPTConfig(width=8, heads=2, depth=1, context=8)), place / "own")
        (place / "own" / name).unlink(missing_ok=True)
        write(place / "own" / name)
        return [*LOOK, "--checkpoint", place / "own"]

    return make


def ours_says(**changes):
    """A checkpoint of ours whose configuration says something else."""

    def make(place):
        args = ours_in("other", lambda path: None)(place)
        edit(place / "own" / "config.json", **changes)
        return args

    return make


def pickled(name, protocol=2):
    return lambda path: (
        torch.save(Runs(path.parent / "was_run"), path)
        if protocol is None
        else plain(path, protocol)
    )


def plain(path, protocol):
    path.write_bytes(pickle.dumps(Runs(path.parent / "was_run"), protocol))


def nanogpt(change, **arguments):
    """A nanoGPT checkpoint, changed before it is written."""

    def make(place):
        checkpoint = {"model": plain_nanogpt.weights(), "model_args": {"n_head": 2, **arguments}}
        change(checkpoint)
        torch.save(checkpoint, place / "ckpt.pt")
        return [*LOOK, "--model", place, "--text", "abc"]

    return make


def bomb(size, entries=1):
    """A torch.save archive whose contents are packed zeros."""

    def make(place):
        torch.save(
            {"model": plain_nanogpt.weights(), "model_args": {"n_head": 2}}, place / "whole.pt"
        )
        with (
            zipfile.ZipFile(place / "whole.pt") as whole,
            zipfile.ZipFile(place / "ckpt.pt", "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            for name in whole.namelist():
                packed.writestr(name, whole.read(name))
            for i in range(entries):
                with packed.open(f"whole/data/{1000 + i}", "w") as part:
                    for _ in range(size >> 20):
                        part.write(bytes(1 << 20))
        return [*LOOK, "--model", place / "ckpt.pt"]

    return make


def safetensors_header(header):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text)


def nested(depth, opening="[", closing="]"):
    return lambda path: path.write_text(depth * opening + depth * closing)


def sparse(size):
    def write(path):
        with path.open("wb") as file:
            file.truncate(size)

    return write


def loop(path):
    path.symlink_to(path)


def text(option, write, name="given"):
    """A file that is given to an option."""

    def make(place):
        write(place / name)
        return [*LOOK, option, place / name, "--width", "8", "--depth", "1"]

    return make


def train(write, *names):
    """nanoGPT's .bin files for a training."""

    def make(place):
        for name in ("train.bin", "val.bin"):
            (write if name in names else lambda path: np.arange(500).astype("<u2").tofile(path))(
                place / name
            )
        return [
            "train",
            "--bin",
            place,
            "--out",
            place / "run",
            "--iterations",
            "1",
            "--width",
            "8",
            "--depth",
            "1",
            "--context",
            "8",
        ]

    return make


def unreadable(path):
    """A link to itself stands for what cannot be opened, also by an administrator."""
    loop(path)


HUGE = 10**40
HOSTILE = {
    # code
    "model code, no architectures": own_code(
        {"AutoModel": "own.Own", "AutoConfig": "own.Own"}, model_type="own", architectures=None
    ),
    "model code, own family": own_code(
        {"AutoModel": "own.Own", "AutoConfig": "own.Own"}, model_type="own", architectures=["Own"]
    ),
    "model code, no family": own_code(
        {"AutoConfig": "own.Own"}, model_type=None, architectures=None
    ),
    "kernels from elsewhere": config(attn_implementation="kernels-community/flash-attn"),
    "kernels in a part": config(text_config={"_attn_implementation": "someone/else"}),
    "own tokenizer code": file_in(
        "tokenizer_config.json",
        lambda p: p.write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}'),
    ),
    **{
        f"pickled weights of ours {p}": ours_in("model.safetensors", pickled("model", p))
        for p in (None, 2, 4)
    },
    **{
        f"pickled config of ours {p}": ours_in("config.json", pickled("config", p))
        for p in (None, 2)
    },
    **{
        f"pickled foreign weights {p}": file_in("model.safetensors", pickled("model", p))
        for p in (None, 2, 4)
    },
    "nanoGPT with code": nanogpt(lambda c: c.update(model=Runs("was_run"))),
    "nanoGPT arguments with code": nanogpt(lambda c: c.update(model_args=Runs("was_run"))),
    "pickled ids": text(
        "--ids", lambda p: np.save(p, np.array([{}], dtype=object), allow_pickle=True), "ids.npy"
    ),
    # places outside
    "index above": index("../outside.safetensors"),
    "index far above": index("../../../../../../etc/passwd"),
    "absolute index": index("{place}/outside.safetensors"),
    "index through a part": index("sub/../../outside.safetensors"),
    "index of one name and one above": index("a.safetensors", "../outside.safetensors"),
    "index of the directory": index("."),
    "index of no name": index(""),
    # no regular files
    **{
        f"foreign {name} is a pipe": file_in(name, os.mkfifo)
        for name in ("config.json", "model.safetensors")
    },
    **{
        f"our {name} is a pipe": ours_in(name, os.mkfifo)
        for name in ("config.json", "model.safetensors")
    },
    **{
        f"foreign {name} is a loop": file_in(name, loop)
        for name in ("config.json", "model.safetensors")
    },
    **{
        f"our {name} is a loop": ours_in(name, loop)
        for name in ("config.json", "model.safetensors")
    },
    **{
        f"our {name} is a directory": ours_in(name, os.mkdir)
        for name in ("config.json", "model.safetensors")
    },
    **{
        f"{option} is a pipe": text(option, os.mkfifo, "a.npy")
        for option in ("--file", "--ids", "--checkpoint", "--model")
    },
    "--architecture is a pipe": lambda place: (
        os.mkfifo(place / "c.json"),
        [*LOOK, "--architecture", place / "c.json"],
    )[1],
    "--file is endless": lambda place: [*LOOK, "--file", "/dev/zero"],
    "nanoGPT is a pipe": lambda place: (os.mkfifo(place / "ckpt.pt"), [*LOOK, "--model", place])[1],
    **{f"{name} is a pipe": train(os.mkfifo, name) for name in ("train.bin", "val.bin")},
    "train.bin is a loop": train(loop, "train.bin"),
    # sizes
    "file of a petabyte": text("--file", sparse(10**15 // 4096)),
    "packed checkpoint": bomb(256 << 20),
    "packed checkpoint of many parts": bomb(8 << 20, entries=40),
    **{
        f"foreign {name} = 10^{e}": config(**{name: 10**e})
        for name in ("n_layer", "n_embd", "vocab_size")
        for e in (6, 12, 40)
    },
    **{
        f"{name} = 10^{e}, no weights": architecture(**{name: 10**e})
        for name in ("n_layer", "n_embd", "vocab_size")
        for e in (8, 12)
    },
    "blocks in a part": config(text_config={"num_hidden_layers": 10**7}),
    **{
        f"our {name} = 10^{e}": ours_says(**{name: 10**e})
        for name in ("depth", "width", "vocab_size", "context")
        for e in (7, 40)
    },
    "our heads = 10^12": ours_says(heads=10**12),
    "a view of one number as 10^12": nanogpt(
        lambda c: c["model"].update({"lm_head.weight": torch.ones(1).expand(10**6, 10**6)})
    ),
    "token table of 10^12 views": nanogpt(
        lambda c: c["model"].update({"transformer.wte.weight": torch.ones(1).expand(10**8, 16)})
    ),
    # zeros and nonsense
    **{
        f"foreign {name} = {value}": config(**{name: value})
        for name in ("n_head", "vocab_size", "n_layer", "n_embd")
        for value in (0, -1)
    },
    **{
        f"{name} = 0, no weights": architecture(**{name: 0})
        for name in ("n_head", "vocab_size", "n_embd")
    },
    **{
        f"our {name} = {value!r}": ours_says(**{name: value})
        for name in ("heads", "depth", "dt")
        for value in (0, -1, "x", None, [])
    },
    **{
        f"nanoGPT heads {value!r}": nanogpt(lambda c: None, n_head=value)
        for value in (0, -2, 3, "two", None, [], 10**40, 1.5)
    },
    # nesting
    **{
        f"{what} nested {depth}": make("config.json", nested(depth))
        for what, make in (("our config", ours_in), ("foreign config", file_in))
        for depth in (900, 10**5, 10**6)
    },
    "config of nested objects": file_in("config.json", nested(5000, '{"a":', "}")),
    "tokenizer nested": lambda place: [
        *file_in("tokenizer.json", nested(10**5))(place)[:-2],
        "--text",
        "abc",
    ],
    # safetensors
    **{
        f"{what} weights: {name}": make("model.safetensors", safetensors_header(header))
        for what, make in (("our", ours_in), ("foreign", file_in))
        for name, header in (
            ("null metadata", {"__metadata__": None}),
            ("metadata alone", {"__metadata__": {"crc32": "0"}}),
            ("a list", []),
            ("empty", b""),
            (
                "beyond the end",
                {"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}},
            ),
            ("negative", b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}'),
            ("nested", 10**5 * b"[" + 10**5 * b"]"),
        )
    },
    "our weights' header of 2^63": ours_in(
        "model.safetensors", lambda p: p.write_bytes(b"\xff" * 8 + b"{}")
    ),
    # recorded states
    "recording of one token": recording(tokens=torch.tensor(3)),
    "recording of ids beyond": recording(tokens=torch.full((1, 8), 10**9)),
    "recording of negative ids": recording(tokens=torch.full((1, 8), -(2**63))),
    "recording of targets beyond": recording(targets=torch.full((1, 8), 2**62)),
    "recording of fewer targets": recording(targets=torch.zeros(1, 7, dtype=torch.int64)),
    "recording of no sequence": recording(tokens=torch.zeros(0, 8, dtype=torch.int64)),
    "recording of many states": recording(states=200),
    # tokenizers
    **{f"rule that doubles {n} times": tokenizer(normalizer=doubling(n)) for n in (30, 60)},
    **{
        f"pattern {pattern}": tokenizer(
            normalizer={"type": "Replace", "pattern": {"Regex": pattern}, "content": "b"}
        )
        for pattern in BACKTRACKING
    },
    "pattern that is none": tokenizer(
        normalizer={"type": "Replace", "pattern": {"Regex": "(" * 50}, "content": "b"}
    ),
    "tokenizer of another kind": tokenizer(model={"type": "Own"}),
}
MAY_BE_READ = {*(name for name in HOSTILE if name.startswith("pattern ")), "own tokenizer code"}
"""What may also be read rightly: a pattern that is worked through in time, code that nothing asks
for.
"""


def made_in(name, place):
    """The request that reads those files, which are made there."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return [str(arg) for arg in HOSTILE[name](place)]
