"""`--model` as users type it: somebody else's model in every instrument, and the one line that each
mistake gets.
"""

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.interop import to_nanogpt
from ctrans.interop.families import small_model
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from tests.helpers import learned, old_command_note
from tests.interop.models import TEXT, VOCABULARY, made
from tests.interop.test_hugging_face import index_alone
from tests.interop.test_open_model import save_tokenizer

COMMANDS = ["simulate", "hjb-check", "control", "screen"]
FEW = ["--context", "6", "--batch", "1", "--json", "-"]
KEYS = {
    "simulate": "placements",
    "hjb-check": "checks",
    "control": "placements",
    "screen": "models",
}


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="ctrans")


def found(name, *args):
    result = run(name, *args, *(["--quick"] if name == "screen" else []))
    expected = (0, old_command_note(name))
    assert (result.exit_code, result.stderr) == expected, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with a model of each kind that the tests look at."""
    root = tmp_path_factory.mktemp("models")
    for name in ("gpt2", "bert", "gemma3", "vit"):
        made(name).save_pretrained(root / name)
    # experts, whose maps show no bound
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, num_local_experts=4)
    )
    learned(experts.eval(), 0.1).save_pretrained(root / "mixtral")
    small_model("albert").save_pretrained(root / "albert")
    save_tokenizer(root / "gpt2")
    config = GPTConfig(
        vocab_size=VOCABULARY, placement="pre", width=16, depth=2, heads=2, context=16
    )
    (root / "nanogpt").mkdir()
    torch.save(to_nanogpt(GPT(config)), root / "nanogpt" / "ckpt.pt")
    save(GPT(config), root / "own")
    rng = np.random.default_rng(0)
    rng.integers(0, VOCABULARY, 500).astype("<u2").tofile(root / "val.bin")
    np.save(root / "ids.npy", rng.integers(0, VOCABULARY, 500))
    return root


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_looks_at_a_hugging_face_model(name, models):
    result = found(name, "--model", models / "gpt2", "--text", "the depth is a time . " * 9, *FEW)
    assert result["model"]["architecture"]["family"] == "gpt2"
    assert "the tokenizer in" in result["model"]["text"]
    assert result["options"]["depth"] == 3
    assert "pre" in json.dumps(result[KEYS[name]])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["simulate", "hjb-check"])
def test_commands_look_at_nanogpts_checkpoint(name, models):
    result = found(name, "--model", models / "nanogpt", "--ids", models / "val.bin", *FEW)
    assert result["model"]["described"].startswith(
        "nanoGPT: 2 blocks of width 16, 2 heads, placement pre"
    )
    assert result["model"]["text"].startswith("token ids of")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["control", "screen"])
def test_commands_look_at_a_model_that_fills_gaps(name, models):
    result = found(name, "--model", models / "bert", "--ids", models / "ids.npy", *FEW)
    assert result["model"]["causal"] is False


@pytest.mark.slow
def test_what_was_recognised_is_said_before_the_figures(models, tmp_path):
    result = run(
        "simulate", "--model", models / "gemma3", "--ids", models / "ids.npy", "--out", tmp_path
    )
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Through the depth the hidden states change in size")
    recognised = "Gemma3ForCausalLM (gemma3_text): 4 blocks of width 32, placement peri"
    at = next(k for k, line in enumerate(lines) if line.startswith(recognised))
    assert lines[at + 1] == f"Text: token ids of {models / 'ids.npy'}; 1 sequence of 32 tokens"


@pytest.mark.slow
def test_a_model_without_bounds_says_so_and_is_drawn(models, tmp_path):
    result = run(
        "simulate",
        "--model",
        models / "mixtral",
        "--ids",
        models / "ids.npy",
        "--out",
        tmp_path,
        "--context",
        8,
    )
    assert result.exit_code == 0, result.output
    assert "no bound is known" in result.stdout
    kept = json.loads((tmp_path / "simulate.json").read_text())["placements"]["pre"]
    assert (kept["bounds"], kept["used"]) == (None, None)
    assert (tmp_path / "simulate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_dt_context_and_dtype_are_the_users(models):
    args = ["--model", models / "gemma3", "--ids", models / "ids.npy", "--json", "-"]
    result = found("simulate", *args, "--dt", "0.25", "--dtype", "float32")
    assert result["options"]["context"] == 32  # the model's own, below the default
    assert result["placements"]["peri"]["times"][-1] == 8 * 0.25
    assert found("simulate", *args, "--context", "5", "--batch", "1")["options"]["context"] == 5


@pytest.mark.slow
def test_the_text_is_read_by_a_models_own_length(models):
    result = found(
        "screen",
        "--model",
        models / "nanogpt",
        "--ids",
        models / "val.bin",
        "--batch",
        1,
        "--json",
        "-",
    )
    (found_there,) = result["models"].values()
    assert found_there["tokens"] == 16
    initial = found_there["steps"]["initialisation"]
    assert initial["verdict"] == "holds"  # Kim's bound is of weights as they are
    assert "lack a premise: weights freshly drawn with mean 0 and known variances" in initial["why"]
    assert initial["result"]["last"]["measured"] <= initial["result"]["last"]["bound"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--context", "200", "--batch", "1"],
            "1 sequence of 32 tokens; its context is 32, and you asked for 200",
        ),
        (["--tokens", "33"], "1 sequence of 32 tokens; its context is 32, and you asked for 33"),
        (["--tokens", "32", "--batch", "2"], "2 sequences of 32 tokens"),
    ],
)
def test_how_much_is_looked_at_is_said_and_what_the_models_context_cuts(
    args, words, models, tmp_path
):
    result = run(
        "simulate",
        "--model",
        models / "gemma3",
        "--ids",
        models / "ids.npy",
        "--no-reference",
        "--out",
        tmp_path,
        *args,
    )
    assert any(line.endswith(f"; {words}") for line in result.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_json_has_how_much_is_looked_at_and_what_was_decided(name, models):
    args = [
        "--model",
        models / "gemma3",
        "--ids",
        models / "ids.npy",
        "--context",
        "6",
        "--batch",
        "2",
        "--json",
        "-",
    ]
    result = found(name, *args)
    assert (result["model"]["sequences"], result["model"]["tokens"]) == (2, 6)
    assert result["options"]["stream"] is False
    if name == "screen":
        assert result["options"]["placements"] == ["peri"]


def damaged(models, name, tmp_path):
    return shutil.copytree(models / name, tmp_path / "copy")


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Runs:
    """What creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), "holds neither config.json nor ckpt.pt"),
    "damaged config": (lambda d: (d / "config.json").write_text("{"), "is no JSON"),
    "unknown family": (lambda d: edit(d, model_type="gtp2"), "did you mean 'gpt2'"),
    "quantised": (
        lambda d: edit(d, quantization_config={"quant_method": "gptq"}),
        "quantised weights",
    ),
    "flash attention": (
        lambda d: edit(d, attn_implementation="flash_attention_2"),
        'set it to "sdpa" or "eager"',
    ),
    "wrong shapes": (lambda d: edit(d, n_embd=64), "does not fit its config.json"),
    "missing shards": (
        lambda d: index_alone(d, '{"metadata": {}, "weight_map": {"a": "x.safetensors"}}'),
        "lacks 1 of 1 weight files, such as x.safetensors",
    ),
    "truncated": (
        lambda d: (d / "model.safetensors").write_bytes(
            (d / "model.safetensors").read_bytes()[:-1000]
        ),
        "no complete safetensors file",
    ),
    "no tokenizer": (
        lambda d: [path.unlink() for path in d.glob("tokenizer*")],
        (
            "has no tokenizer, and its vocabulary of 31 is too small for bytes (256): give token"
            " ids by --ids"
        ),
    ),
    "a directory as tokenizer": (
        lambda d: [(d / "tokenizer.json").unlink(), (d / "tokenizer.json").mkdir()],
        (
            "tokenizer.json' is a directory, and its vocabulary of 31 is too small for bytes (256):"
            " restore the file, or give token ids by --ids FILE"
        ),
    ),
    "damaged tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "does not work"),
    "damaged tokenizer settings": (
        lambda d: (d / "tokenizer_config.json").write_text("["),
        "is no JSON",
    ),
}


def one_line(result, words):
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("ctrans: ")
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.cases(7)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_model_is_one_line_with_exit_code_2(kind, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage, words = DAMAGE[kind]
    directory = damaged(models, "gpt2", tmp_path)
    damage(directory)
    one_line(run("simulate", "--model", directory), words)
    assert not (tmp_path / "out").exists()


@pytest.mark.cases(15)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "absent"], "does not exist (nothing is downloaded)"),
        (["--model", "val.bin"], "is no checkpoint: give a directory with config.json"),
        (
            ["--model", "gpt2/model.safetensors"],
            "is no checkpoint: give a directory with config.json",
        ),
        (["--model", "."], "holds neither config.json nor ckpt.pt"),
        (["--model", "own"], "is a checkpoint of ctrans: pass it as --checkpoint"),
        (["--model", "vit"], "ViTForImageClassification reads no text: give --images PATH"),
        (
            ["--model", "gpt2", "--checkpoint", "own"],
            "2 models are given, --checkpoint 'own', --model 'gpt2'",
        ),
        (
            ["--model", "gpt2", "--placement", "pre", "--width", "8"],
            "--model brings its own placements and width",
        ),
        (["--model", "gpt2", "--norm", "rmsnorm"], "--model brings its own norm"),
        (["--model", "gpt2", "--seed", "1"], "--model brings its own seed"),
        (["--model", "gpt2", "--dt", "0"], "dt = 0.0"),
        (["--model", "gpt2", "--dtype", "float16"], "did you mean 'bfloat16'"),
        (
            ["--model", "gpt2", "--ids", "val.bin", "--text", "abc"],
            "--ids gives token ids, and --file or --text a text",
        ),
        (["--model", "gpt2", "--ids", "absent.bin"], "cannot read 'absent.bin'"),
        (["--model", "gpt2", "--ids", "gpt2/config.json"], "is neither .bin"),
        (
            ["--model", "gpt2", "--model", "bert"],
            (
                "2 models are given, --model 'gpt2', --model 'bert', but this command takes one:"
                " choose one"
            ),
        ),
        (
            ["--checkpoint", "own", "--checkpoint", "own"],
            "'own' is named twice: name each model once",
        ),
        (
            ["--model", "gpt2", "--ids", "large.npy", "--batch", "4"],
            "they run from 0 to 99, and the model's vocabulary from 0 to 30",
        ),
        (["--model", "gpt2", "--file", "ids.npy"], "is no UTF-8"),
        (
            ["--ids", "large.bin", "--batch", "4"],
            "they run from 0 to 999, and the model's vocabulary from 0 to 255",
        ),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(args, words, models, tmp_path, monkeypatch):
    np.save(models / "large.npy", np.arange(100))
    np.arange(1000).astype("<u2").tofile(models / "large.bin")
    monkeypatch.chdir(models)
    one_line(run("simulate", *args, "--context", "200", "--out", tmp_path / "out"), words)
    assert not (tmp_path / "out").exists()


def test_screen_compares_no_architectures_of_a_model(models):
    one_line(
        run("screen", "--model", models / "gpt2", "--compare", "dt=1,0.1"),
        "--model brings its own architecture",
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["hjb-check", "control"])
def test_without_a_loss_there_is_nothing_to_be_optimal_for(name, tmp_path):
    made("gpt2").transformer.save_pretrained(tmp_path)
    np.save(tmp_path / "ids.npy", np.arange(20))
    options = ["--model", tmp_path, "--ids", tmp_path / "ids.npy", "--context", 4, "--loss", "none"]
    one_line(run(name, *options), f"--loss none leaves {name} without a result")


def test_a_remedy_that_the_models_placement_does_not_take_is_refused(models):
    result = run(
        "hjb-check",
        "--model",
        models / "gemma3",
        "--ids",
        models / "ids.npy",
        "--last-map-decay",
        "0.1",
    )
    one_line(result, "'peri'")


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_checkpoint_that_holds_code_is_refused_and_not_run(protocol, tmp_path):
    path, marker = tmp_path / "ckpt.pt", tmp_path / "was_run"
    torch.save({"model": Runs(marker)}, path, pickle_protocol=protocol)
    one_line(run("simulate", "--model", tmp_path), "is not read, as that may run code")
    path.write_bytes(pickle.dumps(Runs(marker), protocol))
    result = run("simulate", "--model", path)
    assert (result.exit_code, result.stdout, "Traceback" in result.output) == (2, "", False)
    assert not marker.exists()
