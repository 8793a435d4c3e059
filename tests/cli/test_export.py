"""`ctrans export` as users type it: what it writes is read by the library, and by ctrans as
somebody else's model.
"""

import errno
import json

import pytest
import torch
import transformers

from ctrans.interop import from_nanogpt, transformers_export
from ctrans.interop.hugging_face_files import INDEX
from ctrans.interop.transformers_export import write_transformers
from ctrans.model.checkpoint import load, save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.cli.test_commands import run, strict

LLAMA = {
    "placement": "pre",
    "norm": "rmsnorm",
    "positions": "rotary",
    "ffn": "swiglu",
    "bias": False,
}
SIZES = {"vocab_size": 256, "depth": 2, "width": 16, "heads": 2, "context": 16}


def test_a_llama_is_written_and_read_by_the_library(tmp_path):
    save(GPT(GPTConfig(**SIZES, **LLAMA)), tmp_path / "ours")
    result = run(
        "export", "--checkpoint", tmp_path / "ours", "--out", tmp_path / "theirs", "--json", "-"
    )
    assert result.exit_code == 0, result.output
    assert strict(result.stdout)["family"] == "Llama"
    tokens = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        expected = load(tmp_path / "ours")(tokens)[0]
        read = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "theirs", local_files_only=True
        )
        assert torch.allclose(read(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    looked = run(
        "simulate",
        "--model",
        tmp_path / "theirs",
        "--context",
        "8",
        "--batch",
        "1",
        "--no-reference",
        "--json",
        "-",
    )
    assert "LlamaForCausalLM" in strict(looked.stdout)["model"]["described"]


def test_nanogpt_has_a_form_too(tmp_path):
    save(GPT(GPTConfig(**SIZES, placement="pre")), tmp_path / "ours")
    assert (
        run(
            "export",
            "--checkpoint",
            tmp_path / "ours",
            "--to",
            "nanogpt",
            "--out",
            tmp_path / "theirs",
        ).exit_code
        == 0
    )
    assert from_nanogpt(tmp_path / "theirs" / "ckpt.pt").config.placement == "pre"


def test_wrong_requests_get_a_line(tmp_path):
    save(GPT(GPTConfig(**SIZES)), tmp_path / "peri")
    for args, words in (
        (
            ["--checkpoint", tmp_path / "peri"],
            "no known family of transformers computes this model",
        ),
        (["--checkpoint", tmp_path / "peri", "--to", "gguf"], "unknown form 'gguf'"),
        ([], "no model is named: give --checkpoint"),
    ):
        result = run("export", *args, "--out", tmp_path / "there")
        assert result.exit_code == 2, result.output
        assert words in result.stderr, result.stderr
        assert not (tmp_path / "there").exists()


def sharded(directory):
    """A directory as save_pretrained() leaves it for a model in two shards, and other files."""
    directory.mkdir()
    names = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    for name in names:
        (directory / name).write_bytes(b"old")
    index = {"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}
    (directory / INDEX).write_text(json.dumps(index))
    (directory / "model-notes.txt").write_text("mine")
    return {*names, INDEX}


def test_the_shards_of_an_earlier_model_are_removed_with_overwrite_alone(tmp_path):
    save(GPT(GPTConfig(**SIZES, **LLAMA)), tmp_path / "ours")
    old = sharded(tmp_path / "theirs")
    args = ["export", "--checkpoint", tmp_path / "ours", "--out", tmp_path / "theirs"]
    refused = run(*args)
    assert (refused.exit_code, f"has {INDEX} of a sharded model" in refused.stderr) == (2, True)
    assert old <= {path.name for path in (tmp_path / "theirs").iterdir()}
    written = run(*args, "--overwrite")
    assert written.exit_code == 0, written.output
    assert "Removed 3 files of the sharded model" in written.stdout
    left = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert left == {"config.json", "model.safetensors", "model-notes.txt", "export.json"}


def test_shards_stay_until_the_new_model_is_whole(tmp_path, monkeypatch):
    old = sharded(tmp_path / "theirs")

    def fail(path, data):
        raise OSError("no space")

    monkeypatch.setattr(transformers_export, "write_durably", fail)
    with pytest.raises(ConfigError, match="no space"):
        write_transformers(GPT(GPTConfig(**SIZES, **LLAMA)), tmp_path / "theirs")
    assert old <= {path.name for path in (tmp_path / "theirs").iterdir()}


class Killed(BaseException):
    """The process ends here: nothing catches it, as nothing catches signal 9."""


def killed():
    raise Killed


def without_space():
    raise OSError(errno.ENOSPC, "No space left on device")


def model_in(directory):
    """The config and the weights of a directory; None without a config, which nothing reads."""
    if not (directory / "config.json").exists():
        return None
    return [(directory / name).read_bytes() for name in ("config.json", "model.safetensors")]


@pytest.mark.parametrize("fail", [killed, without_space])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("is_written", [False, True])
def test_an_export_over_another_leaves_one_of_the_two_or_no_config(
    fail, name, is_written, tmp_path, monkeypatch
):
    earlier, new = (
        GPT(GPTConfig(**SIZES, **LLAMA, rotary_base=base), seed=0) for base in (10.0, 100.0)
    )
    whole = [None]
    for model in (new, earlier):
        write_transformers(model, tmp_path)
        whole.append(model_in(tmp_path))
    write = transformers_export.write_durably

    def write_and_fail(path, data):
        if path.name != name or is_written:
            write(path, data)
        if path.name == name:
            fail()

    monkeypatch.setattr(transformers_export, "write_durably", write_and_fail)
    with pytest.raises((Killed, ConfigError)):
        write_transformers(new, tmp_path)
    assert model_in(tmp_path) in whole
    monkeypatch.undo()
    write_transformers(new, tmp_path)
    assert model_in(tmp_path) == whole[1]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_the_earlier_export(tmp_path, monkeypatch):
    model = GPT(GPTConfig(**SIZES, **LLAMA))
    write_transformers(model, tmp_path)
    before = model_in(tmp_path)
    monkeypatch.setattr(transformers_export, "write_durably", lambda path, data: without_space())
    with pytest.raises(ConfigError, match="No space left"):
        write_transformers(GPT(GPTConfig(**SIZES, **LLAMA, rotary_base=3.0)), tmp_path)
    assert model_in(tmp_path) == before is not None


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_written", [False, True])
def test_an_interrupted_export_leaves_the_earlier_config_if_the_weights_are_untouched(
    is_written, tmp_path, monkeypatch
):
    write_transformers(GPT(GPTConfig(**SIZES, **LLAMA)), tmp_path)
    before = model_in(tmp_path)
    write = transformers_export.write_durably

    def write_and_stop(path, data):
        if is_written:
            write(path, data)
        interrupted()

    monkeypatch.setattr(transformers_export, "write_durably", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        write_transformers(GPT(GPTConfig(**SIZES, **LLAMA, rotary_base=3.0)), tmp_path)
    assert model_in(tmp_path) in ([None] if is_written else [before])


FORMS = {
    "hf": (LLAMA, ["config.json", "model.safetensors"]),
    "nanogpt": ({"placement": "pre"}, ["ckpt.pt"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_another_program_wrote_over_an_export_stays(form, tmp_path):
    options, names = FORMS[form]
    save(GPT(GPTConfig(**SIZES, **options)), tmp_path / "ours")
    place = tmp_path / "theirs"
    args = ["export", "--checkpoint", tmp_path / "ours", "--to", form, "--out", place]
    for _ in range(2):
        assert run(*args).exit_code == 0
    for name in names:
        whole = (place / name).read_bytes()
        (place / name).write_bytes(whole + b" ")  # as a fine-tuning saves
        refused = run(*args)
        assert refused.exit_code == 2, refused.output
        assert f"{name}' is not the file that export.json" in refused.stderr
        assert (place / name).read_bytes() == whole + b" "
        (place / name).write_bytes(whole)
    (place / name).write_bytes(b"mine")
    assert run(*args, "--overwrite").exit_code == 0
    assert run(*args).exit_code == 0


def test_an_export_that_does_not_name_its_files_stays(tmp_path):
    save(GPT(GPTConfig(**SIZES, **LLAMA)), tmp_path / "ours")
    args = ["export", "--checkpoint", tmp_path / "ours", "--out", tmp_path / "theirs"]
    run(*args)
    result = tmp_path / "theirs" / "export.json"
    content = json.loads(result.read_text())
    del content["sha256"]  # as of an earlier version
    result.write_text(json.dumps(content))
    assert "--overwrite" in run(*args).stderr
