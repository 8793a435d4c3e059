"""`ctrans export` as users type it: what it writes is read by the library, and by ctrans as
somebody else's model.
"""

import torch
import transformers

from ctrans.interop import from_nanogpt
from ctrans.model.checkpoint import load, save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
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
