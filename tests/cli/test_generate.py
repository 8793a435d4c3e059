"""`ctrans generate` as users type it."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from ctrans.cli.generate import encode
from ctrans.dynamics.scheme import Scheme
from ctrans.model.checkpoint import CONFIG, WEIGHTS, load, save
from ctrans.model.config import GPTConfig
from ctrans.model.generation import generate
from ctrans.model.gpt import GPT
from ctrans.model.sums import SUMS, sums
from ctrans.training.loop import carry_out
from solvers import ConfigError
from tests.cli.test_commands import run, strict
from tests.helpers import learned
from tests.training import helpers as training

SIZES = {"depth": 1, "width": 16, "heads": 2, "context": 12}


def speaker(says, vocabulary=256, **changes):
    """A model that says the same bytes over and over: each token's embedding is its own, the last
    FFN maps it to the next.
    """
    config = GPTConfig(
        vocab_size=vocabulary,
        depth=1,
        width=vocabulary,
        heads=1,
        context=8,
        placement="none",
        **changes,
    )
    model = GPT(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    model.token_embedding.weight.copy_(torch.eye(vocabulary))
    attention, ffn = model.depth.sublayers
    attention.field.out.weight.zero_()
    ffn.field.up.weight[:vocabulary] = torch.eye(vocabulary)
    for now, then in zip(says, says[1:] + says[:1], strict=True):
        ffn.field.down.weight[then, now] = 100.0
    model.final_norm.weight.fill_(1.0)
    return model


@pytest.fixture
def spoken(tmp_path):
    def make(says, **changes):
        save(speaker(says, **changes), tmp_path / "model")
        return tmp_path / "model"

    return make


def test_text_is_continued_in_utf_8(spoken):
    place = spoken("né".encode() + b" \n")
    result = run(
        "generate", "--checkpoint", place, "--prompt", "n", "--tokens", "9", "--temperature", "0"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "né \nné \n\n"
    assert result.stderr == ""


def test_bytes_that_are_no_utf_8_or_would_steer_a_terminal_are_shown_harmless(spoken):
    place = spoken(b"a\xff\x1b\tb\xc3")
    result = run(
        "generate", "--checkpoint", place, "--prompt", "a", "--tokens", "5", "--temperature", "0"
    )
    assert result.stdout == "a�\\x1b\tb�\n"
    kept = run(
        "generate",
        "--checkpoint",
        place,
        "--prompt",
        "a",
        "--tokens",
        "5",
        "--temperature",
        "0",
        "--json",
        "-",
    )
    (sample,) = strict(kept.stdout)["samples"]
    assert sample["tokens"] == [0xFF, 0x1B, 0x09, ord("b"), 0xC3]
    assert sample["text"] == "�\x1b\tb�"


def test_samples_are_those_of_consecutive_seeds(tmp_path):
    model = learned(GPT(GPTConfig(**SIZES)), 0.3).requires_grad_(False)
    save(model, tmp_path)
    common = (
        "generate",
        "--checkpoint",
        tmp_path,
        "--prompt",
        "ab",
        "--tokens",
        "15",
        "--top-k",
        "40",
        "--json",
        "-",
    )
    both = strict(run(*common, "--seed", "5", "--samples", "2").stdout)
    assert [sample["seed"] for sample in both["samples"]] == [5, 6]
    for sample in both["samples"]:
        alone = strict(run(*common, "--seed", sample["seed"]).stdout)["samples"][0]
        assert alone["tokens"] == sample["tokens"]
        expected = generate(
            model, torch.tensor([97, 98]), 15, temperature=0.8, top_k=40, seed=sample["seed"]
        )
        assert sample["tokens"] == expected.tolist()
    assert both["prompt"] == [97, 98]


def test_an_empty_prompt_is_a_new_line(tmp_path):
    save(GPT(GPTConfig(**SIZES)), tmp_path)
    assert strict(run("generate", "--checkpoint", tmp_path, "--tokens", "2", "--json", "-").stdout)[
        "prompt"
    ] == [10]


def test_a_vocabulary_that_is_not_bytes_is_asked_for_and_shown_as_token_ids(spoken):
    place = spoken([3, 9, 27], vocabulary=300)
    result = run(
        "generate",
        "--checkpoint",
        place,
        "--prompt",
        "27, 3",
        "--tokens",
        "4",
        "--temperature",
        "0",
    )
    assert result.stdout == "27 3 9 27 3 9\n"
    for prompt in ("", "x", "300", "-1"):
        with pytest.raises(ConfigError, match="token ids from 0 to 299"):
            encode(prompt, 300)


def test_a_run_directory_gives_its_best_model(tmp_path):
    save(speaker(b"no"), tmp_path / "1")
    save(speaker(b"yes"), tmp_path / "2")
    (tmp_path / "last").symlink_to("1")
    (tmp_path / "best").symlink_to("2")
    said = run(
        "generate", "--checkpoint", tmp_path, "--prompt", "y", "--tokens", "2", "--temperature", "0"
    )
    assert said.stdout == "yes\n"


def trained(directory, **settings):
    """The directory of a run of one iteration, with weights big enough that methods disagree on the
    text.
    """
    begun, progress = training.start(
        directory, {"dt": 1.0, "placement": "pre"}, iterations=1, **settings
    )
    learned(begun.model, 0.5)
    carry_out(begun, progress)
    return directory


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("settings", "scheme", "said"),
    [
        ({"method": "rk4", "steps": 2}, Scheme("rk4", 2), "--method rk4 --steps 2"),
        ({"method": "tsit5", "rtol": 0.1}, Scheme("tsit5", rtol=0.1), "--method tsit5 --rtol 0.1"),
        ({"gradient": "reversible"}, Scheme(gradient="reversible"), "--gradient reversible"),
        ({"method": "heun", "gradient": "adjoint"}, Scheme("heun"), "--method heun"),
        ({"gradient": "checkpoint"}, Scheme(), None),
    ],
)
def test_a_runs_model_is_integrated_as_it_was_trained_and_says_so(settings, scheme, said, tmp_path):
    place = trained(tmp_path, **settings)
    result = run(
        "generate",
        "--checkpoint",
        place,
        "--prompt",
        "ab",
        "--tokens",
        "8",
        "--temperature",
        "0",
        "--json",
        "-",
    )
    assert result.stderr == (
        "" if said is None else f"ctrans: integrated as it was trained, {said}\n"
    )
    kept = strict(result.stdout)
    assert kept["scheme"] == dataclasses.asdict(scheme)
    model, prompt = load(place), torch.tensor([97, 98])
    expected, discrete = (
        generate(model, prompt, 8, temperature=0.0, **how) for how in ({"scheme": scheme}, {})
    )
    assert kept["samples"][0]["tokens"] == expected.tolist()
    assert torch.equal(expected, discrete) == (scheme == Scheme())


@pytest.mark.parametrize(
    "state", ["{", "[]", '{"progress": 3, "config": {}, "source": {}, "fingerprint": ""}']
)
def test_a_runs_state_that_cannot_be_read_is_named(state, tmp_path):
    place = trained(tmp_path, method="rk4")
    (place / "best" / "train.json").write_text(state)
    damaged = run("generate", "--checkpoint", place)
    assert (damaged.exit_code, "train.json' is damaged: its SHA-256" in damaged.stderr) == (2, True)
    (place / "best" / SUMS).write_bytes(sums(place / "best"))
    result = run("generate", "--checkpoint", place)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert (
        "train.json' is no JSON" if state == "{" else "train.json' is no training state"
    ) in result.stderr


def test_other_commands_take_a_run_directory_too(tmp_path):
    save(GPT(GPTConfig(**SIZES, depth_weights="linear", knots=1)), tmp_path / "best")
    result = run("simulate", "--checkpoint", tmp_path, "--batch", "1", "--json", "-")
    assert strict(result.stdout)["options"]["width"] == SIZES["width"]


@pytest.mark.slow
def test_text_appears_as_it_is_made(spoken):
    """A reader that leaves after the first words must not wait for the rest: a million tokens would
    take minutes.
    """
    place = spoken(b"ab")
    command = [
        sys.executable,
        "-m",
        "ctrans",
        "generate",
        "--checkpoint",
        str(place),
        "--prompt",
        "a",
        "--tokens",
        "1000000",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.read(6) == b"ababab"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.cases(11)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "0"], "tokens = 0"),
        (["--samples", "0"], "samples = 0"),
        (["--temperature", "-1"], "temperature = -1"),
        (["--temperature", "nan"], "temperature = nan"),
        (["--top-k", "0"], "top_k = 0"),
        (["--top-k", "257"], "top_k = 257 of a vocabulary of 256"),
        (["--seed", "-1"], "seed = -1"),
        (["--seed", str(2**63 - 1), "--samples", "2"], f"seed = {2**63}"),
        (["--tokens", "many"], "'many' is not a valid integer"),
        (["--device", "tpu9"], "device 'tpu9' is not available"),
        (
            ["--checkpoint", "nowhere"],
            "2 models are given, --checkpoint 'model', --checkpoint 'nowhere'",
        ),
        (["--json", "/proc/nothing/a.json"], "there is no directory '/proc/nothing'"),
    ],
)
def test_each_mistake_gets_one_line_and_exit_code_2(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(GPT(GPTConfig(**SIZES)), "model")
    result = run("generate", "--checkpoint", "model", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_checkpoint_must_be_named_and_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("generate")
    assert (result.exit_code, result.stderr) == (2, "ctrans: Missing option '--checkpoint'.\n")
    result = run("generate", "--checkpoint", "nowhere")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "there is no checkpoint 'nowhere' that can be read" in result.stderr


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_damaged_checkpoint_gets_one_line(name, tmp_path):
    save(GPT(GPTConfig(**SIZES)), tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-5])
    result = run("generate", "--checkpoint", tmp_path)
    assert result.exit_code == 2
    assert name in result.stderr
    assert result.stderr.count("\n") == 1


def test_diverged_weights_exit_with_1(tmp_path):
    model = GPT(GPTConfig(**SIZES)).requires_grad_(False)
    model.token_embedding.weight.fill_(torch.inf)
    save(model, tmp_path)
    result = run("generate", "--checkpoint", tmp_path)
    assert result.exit_code == 1
    assert "not finite" in result.stderr
