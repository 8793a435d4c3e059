"""What simulate looks at beside the trajectory: exponents by token as coloured text, spectra,
contributions; any model's.
"""

import json

import pytest
import torch
from rich.console import Console

from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.measured import measured_in
from ctrans.model.orders import depth_convergence, substep_convergence
from ctrans.report.sections import Chapter, ColouredText, Page, Token
from ctrans.report.terminal import show
from ctrans.report.token_colours import colours, visible
from tests.cli.test_commands import run

BESIDE = ["--lyapunov", "6", "--spectra", "--contributions", "--no-reference", "--batch", "1"]
SMALL = ["--depth", "1", "--width", "8", "--heads", "2", "--context", "8", "--placement", "pre"]


def result(*args, **options):
    found = run("simulate", *BESIDE, *args, "--json", "-", **options)
    assert found.exit_code == 0, found.stderr
    (model,) = json.loads(found.stdout)["placements"].values()
    return model


def test_they_are_there_when_asked_for_and_null_otherwise():
    model = result(*SMALL, "--text", "ab<b>cdefghijklmn")
    assert model["lyapunov"]["words"] == list("ab<b>c")
    assert len(model["lyapunov"]["exponents"]) == 6
    assert {each["product"] for each in model["spectra"]} == {"QK", "OV", "W_2 W_1"}
    assert sum(model["contributions"]["state"]) == pytest.approx(1, abs=1e-12)
    plain = json.loads(run("simulate", *SMALL, "--no-reference", "--json", "-").stdout)[
        "placements"
    ]["pre"]
    assert plain["lyapunov"] is plain["spectra"] is plain["contributions"] is None


@pytest.mark.slow
def test_the_parts_of_the_last_state_stand_in_a_table_with_a_row_each(tmp_path):
    found = run("simulate", *BESIDE, *SMALL, "--text", "abcdefghijklmn", "--out", tmp_path)
    kept = json.loads((tmp_path / "simulate.json").read_text())
    contributions = kept["placements"]["pre"]["contributions"]
    rows = [line.split() for line in found.stdout.splitlines()]
    for name, share in zip(contributions["names"], contributions["state"], strict=True):
        (row,) = [row for row in rows if " ".join(row[: len(name.split())]) == name]
        assert float(row[len(name.split())]) == pytest.approx(share, rel=5e-3, abs=1e-12)


@pytest.mark.slow
def test_the_slopes_of_all_placements_are_one_at_the_defaults_with_dt_a_tenth(tmp_path):
    found = run("simulate", "--placement", "all", "--dt", "0.1", "--out", tmp_path)
    assert found.exit_code == 0, found.stderr
    table = measured_in(json.loads((tmp_path / "simulate.json").read_text())["measured"])
    slopes = {value.model: value.value for value in table.of("slope of the Euler limit")}
    assert slopes == pytest.approx(dict.fromkeys(PLACEMENTS, 1.0), abs=0.05)
    first = {value.words for value in table.of("error of the discrete model")}
    assert first == {"this GPT, bit for bit"}
    for measure in ("straightness", "W_2^2 of the tokens", "share of the displacement"):
        assert {value.model for value in table.of(measure)} == set(PLACEMENTS)


@pytest.mark.slow
def test_orders_are_those_of_the_models_placement_norm_and_seed(tmp_path):
    asked = ["--norm", "rmsnorm", "--seed", "3", "--orders", "heun", "--orders", "depth"]
    found = run("simulate", *SMALL, "--no-reference", *asked, "--out", tmp_path)
    assert found.exit_code == 0, found.stderr
    table = measured_in(json.loads((tmp_path / "simulate.json").read_text())["measured"])
    orders = {value.model: value.value for value in table.of("order")}
    assert orders == {
        "substeps, heun, pre": substep_convergence("heun", "pre", "rmsnorm", 3).order,
        "depth, plain, pre": depth_convergence("pre", norm="rmsnorm", seed=3).order,
        "depth, symmetric, pre": depth_convergence(
            "pre", symmetric=True, norm="rmsnorm", seed=3
        ).order,
    }
    titles = [line for line in found.stdout.splitlines() if line.startswith("Orders of")]
    assert len(titles) == 1
    assert "Figures by depth" in found.stdout  # as there is one model


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--orders", "fast"], "unknown order 'fast'"),
        (["--orders", "torchdiffeq:dopri5"], "only runs with adaptive steps"),
        (["--orders", "depth", "--placement", "post/pre"], "needs one placement"),
    ],
)
def test_orders_that_cannot_be_measured_are_refused_before_the_models_run(asked, words, tmp_path):
    found = run("simulate", *asked, "--out", tmp_path / "out")
    assert (found.exit_code, words in found.stderr) == (2, True), found.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_token_is_text_on_the_page_and_never_markup(tmp_path):
    page = tmp_path / "page.html"
    found = run(
        "simulate",
        *BESIDE,
        *SMALL,
        "--text",
        "<script>alert(1)</script>",
        "--html",
        page,
        "--out",
        tmp_path / "out",
    )
    assert found.exit_code == 0, found.stderr
    (text,) = [
        line
        for line in page.read_text().splitlines()
        if line.startswith('<span style="background: #')
    ]
    assert text.count("<span") == 6
    assert ">&lt;</span>" in text
    assert {"spectra.png", "contributions.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert "<scrip" in found.stdout


def test_colours_say_the_sign_and_the_size():
    assert colours([1.0, 0.0, -1.0, -float("inf")]) == ["#d64541", "#ffffff", "#4371cb", "#bbbbbb"]
    assert visible("\x1b[31m\n") == "\\x1b[31m⏎"


def test_a_token_on_a_terminal_is_never_markup(capsys):
    tokens = ColouredText("words", [Token("[red]", "#d64541", "1"), Token("x", "#4371cb", "-1")])
    show(Page("", "", [Chapter("", [tokens])], {}), Console())
    assert "[red]x" in capsys.readouterr().out


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_of_another_library(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    if family == "llama":
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, intermediate_size=24, num_key_value_heads=1)
        )
    else:
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=256, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        )
    made.save_pretrained(tmp_path)
    model = result("--model", tmp_path, "--context", "8")
    dense = torch.linalg.eigvals(_qk(made, family).double())
    expected = dense.abs().sort(descending=True).values[: len(model["spectra"][0]["real"])]
    first = model["spectra"][0]
    sizes = (
        torch.tensor(first["real"]).double().square()
        + torch.tensor(first["imaginary"]).double().square()
    )
    torch.testing.assert_close(sizes.sqrt(), expected, rtol=1e-5, atol=1e-6)
    assert sum(model["contributions"]["state"]) == pytest.approx(1, abs=1e-9)
    assert len(model["lyapunov"]["exponents"]) == 6


def _qk(made, family):
    """Q'K of the first head of the first layer."""
    if family == "llama":
        attention = made.model.layers[0].self_attn
        return attention.q_proj.weight[:8].T @ attention.k_proj.weight[:8]
    weight = made.transformer.h[0].attn.c_attn.weight
    return weight[:, :8] @ weight[:, 16:24].T
