"""--python, --anatomy, --loss and --heads as users type them, and the one line that each mistake
gets.
"""

import json
import sys

import numpy as np
import pytest
import torch
import transformers

from ctrans.interop import to_nanogpt
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from tests.cli.test_model_option import COMMANDS, found, run
from tests.helpers import learned
from tests.interop.models import SMALL, TEXT, VOCABULARY, made

FEW = ["--context", "6", "--batch", "1", "--json", "-"]
CODE = """
import torch
from tests.interop.plain_modules import ImageClassifier, plain

def model():
    return plain("language")

def images():
    return ImageClassifier()

def number():
    return 3

def wanting(width):
    return plain("language")

class Turned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = plain("language")

    def forward(self, ids):
        return {"prediction": self.inner(ids).transpose(1, 2)}

def turned():
    return Turned()

class Ramped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = plain("language"), torch.nn.Linear(31, 31)

    def forward(self, ids):
        return self.out(self.inner(ids).float())

def ramped():
    return Ramped()

def broken():
    raise ValueError("no weights here")

def batch():
    return torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))

def labelled():
    return batch(), torch.tensor([0, 1, 2, 3, 4])

def unlike():
    return batch(), torch.tensor([0])

def loss(output, targets):
    return torch.nn.functional.cross_entropy(output, targets)
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    root = tmp_path_factory.mktemp("any")
    (root / "mine.py").write_text(CODE)
    encoder = transformers.BertModel(transformers.BertConfig(**SMALL, max_position_embeddings=32))
    learned(encoder.eval(), 0.1).save_pretrained(root / "encoder")
    made("llama").save_pretrained(root / "llama")
    granite = transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**TEXT, residual_multiplier=0.22)
    )
    learned(granite.eval(), 0.1).save_pretrained(root / "granite")
    (root / "llama.toml").write_text(
        'blocks = "model.layers"\nattention = "self_attn"\nffn = ["mlp"]\n'
    )
    (root / "wrong.toml").write_text('layers = "model.layers"\n')
    (root / "other.toml").write_text('blocks = "model.blocks"\n')
    (root / "number.toml").write_text("blocks = 3\n")
    (root / "none.toml").write_text("blocks =\n")
    config = GPTConfig(
        vocab_size=VOCABULARY, placement="pre", width=16, depth=2, heads=2, context=16
    )
    torch.save(to_nanogpt(GPT(config))["model"], root / "weights.pt")
    np.save(root / "ids.npy", np.random.default_rng(0).integers(0, VOCABULARY, 500))
    return root


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_looks_at_what_a_function_returns(name, there):
    result = found(name, "--python", f"{there / 'mine.py'}:model", "--ids", there / "ids.npy", *FEW)
    assert result["model"]["architecture"]["family"] == "module"
    assert result["model"]["described"].startswith(
        "LanguageModel (module): 3 blocks of width 32, placement pre"
    )
    assert result["options"]["python"] == f"{there / 'mine.py'}:model"


def test_help_says_that_python_runs_code():
    for name in COMMANDS:
        assert "This runs the code of the Python module" in " ".join(
            run(name, "--help-all").stdout.split()
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_looks_at_a_model_without_a_head(name, there):
    result = found(name, "--model", there / "encoder", "--ids", there / "ids.npy", *FEW)
    assert "stand-in" in result["model"]["described"]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mlm", "next", "mean", "random"])
def test_the_loss_is_the_one_asked_for(loss, there):
    result = found(
        "control", "--model", there / "encoder", "--ids", there / "ids.npy", "--loss", loss, *FEW
    )
    (one,) = (
        result["placements"].values()
        if isinstance(result["placements"], dict)
        else result["placements"]
    )
    assert result["options"]["loss"] == loss
    assert np.isfinite(one["loss"])
    assert (one["loss"] > 1) == (loss in ("mlm", "next"))  # nats, near log 31


@pytest.mark.slow
def test_without_a_loss_the_screening_leaves_out_what_needs_one(there):
    result = found(
        "screen", "--model", there / "encoder", "--ids", there / "ids.npy", "--loss", "none", *FEW
    )
    (model,) = result["models"].values()
    assert model["missing"].keys() == {"well-posedness", "updates", "initialisation"}
    assert model["steps"].keys() == {"forward", "backward", "transport", "attention"}


@pytest.mark.slow
def test_a_residual_multiplier_is_the_models_dt_and_dt_scales_it(there):
    options = ["--model", there / "granite", "--ids", there / "ids.npy", *FEW]
    assert found("simulate", *options)["placements"]["pre"]["times"][-1] == pytest.approx(6 * 0.22)
    assert found("simulate", *options, "--dt", "0.5")["placements"]["pre"]["times"][
        -1
    ] == pytest.approx(6 * 0.11)


def test_an_anatomy_names_the_parts(there):
    result = found(
        "simulate",
        "--model",
        there / "llama",
        "--anatomy",
        there / "llama.toml",
        "--ids",
        there / "ids.npy",
        *FEW,
    )
    assert result["model"]["architecture"]["attention"] == "LlamaAttention"


def test_a_bare_state_dict_is_read_with_its_heads(there):
    options = ["--ids", there / "ids.npy", *FEW]
    result = found("simulate", "--model", there / "weights.pt", "--heads", "2", *options)
    assert "2 heads" in result["model"]["described"]


@pytest.mark.cases(19)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--model", "encoder", "--loss", "mse"],
            "loss 'mse' is not known: choose one of next, mlm, mean, random, none",
        ),
        (["--loss", "mlm"], "--loss is for a model of another library"),
        (["--anatomy", "llama.toml"], "--anatomy is for a model of another library"),
        (["--model", "llama", "--anatomy", "wrong.toml"], "layers"),
        (["--model", "llama", "--anatomy", "other.toml"], "model.layers: 3 LlamaDecoderLayer"),
        (["--model", "llama", "--anatomy", "number.toml"], "blocks = 3 is no path of attributes"),
        (["--model", "llama", "--anatomy", "none.toml"], "is no TOML"),
        (["--model", "llama", "--anatomy", "absent.toml"], "absent.toml"),
        (["--model", "llama", "--heads", "4"], "only for a bare state dict of nanoGPT"),
        (["--model", "weights.pt"], "give heads=... (--heads)"),
        (["--python", "mine.py"], "is no module:function"),
        (
            ["--python", "mine.py:absent"],
            "has no function 'absent'; its functions: model, images, number, wanting, turned",
        ),
        (
            ["--python", "mine.py:wanting"],
            "is called without arguments: missing a required argument: 'width'",
        ),
        (
            ["--python", "mine.py:turned", "--loss", "next"],
            "loss 'next' needs logits (sequences, tokens, ",
        ),
        (["--python", "mine.py:ramped"], "if its code makes float32 tensors, give --dtype float32"),
        (["mine.py:model"], "is no directory: for a function that makes a module use --python"),
        (["--python", "mine.py:number"], "returned int: return an nn.Module"),
        (["--python", "mine.py:broken"], "ValueError: no weights here"),
        (["--python", "mine.py:images"], "ImageClassifier embeds no tokens"),
        (["--python", "mine.py:model", "--model", "llama"], "2 models are given, --model"),
        (["--python", "mine.py:model", "--placement", "pre"], "--python brings its own placements"),
    ],
)
def test_a_wrong_request_gets_a_line_and_exit_code_2(args, words, there):
    resolved = [
        (
            str(there / each)
            if (there / each.split(":")[0]).exists() or each == "absent.toml"
            else each
        )
        for each in args
    ]
    result = run("simulate", *resolved, "--ids", there / "ids.npy", *FEW)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split()), result.stderr
    assert "Traceback" not in result.output
    assert json.dumps(result.stdout) == '""'


@pytest.mark.slow
def test_a_file_imports_what_lies_beside_it_and_its_context_is_found(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "beside_me.py").write_text(
        "from tests.interop.plain_modules import LanguageModel as Made\n"
    )
    (folder / "model.py").write_text(
        "from beside_me import Made\n\n\ndef build():\n    return Made()\n"
    )
    np.save(tmp_path / "ids.npy", np.arange(400) % 31)
    result = run(
        "screen",
        "--python",
        f"{folder / 'model.py'}:build",
        "--ids",
        tmp_path / "ids.npy",
        "--quick",
        "--json",
        "-",
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["models"]) == ["model.py:build"]
    assert found["model"]["tokens"] == 16, "its table of positions is that long"
    assert str(folder) not in sys.path


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_module_reads_and_its_loss_are_functions_of_the_users(name, there):
    mine = there / "mine.py"
    args = [
        "--python",
        f"{mine}:images",
        "--example",
        f"{mine}:labelled",
        "--loss",
        f"{mine}:loss",
        "--json",
        "-",
    ]
    result = found(name, *args, *(["--quick"] if name == "screen" else []))
    assert result["model"]["text"] == f"the batch of {mine}:labelled"
    smaller = {"hjb-check": 1, "control": 2, "screen": 2}
    assert result["model"]["sequences"] == smaller.get(
        name, 4
    )  # of five rows; a screening holds as many beside


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--python", "mine.py:images", "--example", "mine.py:number"],
            "returns a int: return a tensor",
        ),
        (
            ["--python", "mine.py:images", "--example", "mine.py:unlike"],
            "returns 5 rows and targets (1,): give as many targets",
        ),
        (
            ["--python", "mine.py:images", "--example", "mine.py:batch", "--batch", "6"],
            "has 5 rows, and 6 are wanted: give more, or lower",
        ),
        (
            ["--python", "mine.py:images", "--example", "mine.py:labelled", "--text", "a"],
            "gives a batch with targets, and --text another",
        ),
        (
            ["--model", "llama", "--example", "mine.py:batch"],
            "--example is for the module of --python",
        ),
        (["--python", "mine.py:model", "--loss", "mine.py:none"], "has no function 'none'"),
        (["llama", "llama"], "'llama' is named twice: name each model once"),
        (["llama", "--checkpoint", "llama"], "2 models are given"),
    ],
)
def test_a_wrong_example_or_a_second_model_is_a_line(args, words, there, monkeypatch):
    monkeypatch.chdir(there)
    result = run("simulate", "--no-reference", "--json", "-", *args)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split()), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_is_an_argument_of_every_command_that_looks_at_one(name, there):
    args = ["--ids", there / "ids.npy", *FEW, *(["--quick"] if name == "screen" else [])]
    one, other = (
        found(name, *form, *args) for form in ([there / "llama"], ["--model", there / "llama"])
    )
    assert one["model"] == other["model"]
    assert one["options"]["named"] == [str(there / "llama")]


IDS = """
import torch

def ids():
    return torch.arange(24).view(3, 8) % 13

"""


def test_token_ids_of_an_example_are_what_is_looked_at(there):
    (there / "ids.py").write_text(IDS)
    result = found(
        "simulate",
        "--python",
        f"{there / 'mine.py'}:model",
        "--example",
        f"{there / 'ids.py'}:ids",
        "--json",
        "-",
    )
    assert (result["model"]["sequences"], result["model"]["tokens"]) == (3, 8)
    assert result["model"]["text"] == f"the batch of {there / 'ids.py'}:ids"


def test_a_module_of_few_tokens_reads_a_text_modulo_its_vocabulary_and_says_so(there):
    result = found(
        "simulate",
        "--python",
        f"{there / 'mine.py'}:model",
        "--context",
        "8",
        "--no-reference",
        "--json",
        "-",
    )
    size = result["model"]["vocabulary"]
    assert size < 256
    assert result["model"]["text"].startswith(f"bytes as token ids, modulo {size}")


def test_a_screening_of_too_few_rows_says_what_they_are_for(there):
    (there / "ids.py").write_text(IDS)
    args = [
        "--python",
        f"{there / 'mine.py'}:model",
        "--example",
        f"{there / 'ids.py'}:ids",
        "--batch",
        "2",
        "--quick",
    ]
    result = run("screen", *args)
    assert result.exit_code == 2
    words = (
        "has 3 rows, and 4 are wanted (2 for the model, and as many for comparison): give more, or"
        " lower --batch to 1"
    )
    assert words in " ".join(result.stderr.split())


READER = """
import torch

class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.start = torch.nn.Parameter(torch.randn(1, 3, 8))
        self.maps = torch.nn.ModuleList(torch.nn.Linear(16, 8) for _ in range(3))

    def forward(self, points):
        x, read = self.start.repeat(len(points), 1, 1), points.mean(1, keepdim=True).expand(-1, 3, -1)
        for each in self.maps:
            x = x + each(torch.cat([x, read], -1)).tanh()
        return x.mean(1)

def points():
    return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
"""


def test_a_screening_reads_an_example_whose_other_inputs_are_a_context(there):
    """What a row reads besides its state is known for the first rows of the example."""
    reader = there / "reader.py"
    reader.write_text(READER)
    result = found(
        "screen",
        "--python",
        f"{reader}:Reader",
        "--example",
        f"{reader}:points",
        "--quick",
        "--json",
        "-",
    )
    assert result["model"]["sequences"] == 2
    assert result["models"]["reader.py:Reader"]["steps"]["updates"]["verdict"] == "moves"


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["control", "hjb-check"])
def test_without_a_loss_there_is_no_costate(name, there):
    result = run(
        name, "--model", there / "encoder", "--ids", there / "ids.npy", "--loss", "none", *FEW
    )
    assert result.exit_code == 2
    assert f"--loss none leaves {name} without a result" in " ".join(result.stderr.split())


def test_a_config_without_a_family_gets_a_line(there):
    (there / "bare").mkdir(exist_ok=True)
    (there / "bare" / "config.json").write_text("{}")
    result = run("diagnose", "--model", there / "bare")
    assert result.exit_code == 2
    assert "has no model_type, the family of the model" in " ".join(result.stderr.split())
