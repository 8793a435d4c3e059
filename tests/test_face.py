"""What `from ctrans import ...` gives: every name, typed, and nothing imported before it is asked
for.
"""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ctrans
from ctrans import GPT, GPTConfig, certify, costate, simulate
from tests.helpers import small_model

ROOT = Path(__file__).parent.parent
WANTED = [
    "GPT",
    "GPTConfig",
    "ODEBlock",
    "Depth",
    "Sublayer",
    "LayerNorm",
    "RMSNorm",
    "PLACEMENTS",
    "ATTENTIONS",
    "FFNS",
    "Scheme",
    "simulate",
    "screen",
    "certify",
    "costate",
    "open_model",
    "from_transformers",
    "from_nanogpt",
    "load",
    "save",
    "train",
    "ConfigError",
    "SolveError",
]


def imported_for_type_checkers():
    """Names and modules of the imports under TYPE_CHECKING."""
    tree = ast.parse(inspect.getsource(ctrans))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_all_names_are_there_and_listed():
    assert set(WANTED) <= set(ctrans.__all__) <= set(dir(ctrans))
    assert all(getattr(ctrans, name) is not None for name in ctrans.__all__)
    with pytest.raises(AttributeError, match="no attribute 'screem'"):
        _ = ctrans.screem


def test_type_checkers_see_what_there_is():
    homes = imported_for_type_checkers()
    assert homes.keys() == set(ctrans.__all__) == ctrans._HOMES.keys()
    for name, module in homes.items():
        home = getattr(importlib.import_module(module), name)
        assert inspect.unwrap(home) is inspect.unwrap(getattr(ctrans, name))
        assert ctrans._HOMES[name] == module
    assert all((ROOT / package / "py.typed").exists() for package in ("ctrans", "solvers"))


def test_importing_it_imports_no_torch():
    code = (
        "import sys, ctrans; dir(ctrans); assert not {'torch', 'numpy', 'click'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


USER = """
import ctrans
from ctrans import GPT, GPTConfig, diagnose, load, screen, simulate, train
model = GPT(GPTConfig(depth=2))
reveal_type(model.config)
reveal_type(load("x"))
reveal_type(train(GPTConfig(), out="x").model)
reveal_type(simulate)
GPTConfig(dept=3)
ctrans.screem
simulate(model, model.token_embedding.weight, metod="rk4")
screen(model, None, None, sede=1)
diagnose(model, None, weight_deca=0.1)
"""


@pytest.mark.slow
def test_a_users_types_are_checked(tmp_path):
    """mypy, which knows nothing of this repository but where it lies, sees real types and finds
    every mistake.
    """
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    cache = ROOT / ".mypy_cache" / "users"
    args = [
        "--config-file=",
        "--ignore-missing-imports",
        f"--cache-dir={cache}",
        str(tmp_path / "user.py"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *args],
        capture_output=True,
        text=True,
        check=False,
        env={"MYPYPATH": str(ROOT)},
    )
    lines = [
        line.partition("user.py:")[2]
        for line in done.stdout.splitlines()
        if "user.py:" in line and "note:" not in line.replace("note: Revealed", "")
    ]
    assert lines[:3] == [
        '5: note: Revealed type is "ctrans.model.config.GPTConfig"',
        '6: note: Revealed type is "ctrans.model.gpt.GPT"',
        '7: note: Revealed type is "ctrans.model.gpt.GPT"',
    ], done.stdout + done.stderr
    assert "ctrans.measure.forward.simulation.Simulation" in lines[3]
    assert 'Unexpected keyword argument "dept"' in lines[4]
    assert '"screem"' in lines[5]
    misspelt = [line for line in lines if "Unexpected keyword argument" in line]
    assert [line.split('"')[1] for line in misspelt] == [
        "dept",
        "metod",
        "sede",
        "weight_deca",
    ], done.stdout


LOOKING = {
    "diagnose": "ctrans.examine.diagnosis.diagnose",
    "screen": "ctrans.examine.screening.screen",
    "simulate": "ctrans.measure.forward.simulation",
}
"""What opens any model, and where the function of that name is that then looks at it."""


@pytest.mark.parametrize("name", LOOKING)
def test_what_looks_at_any_model_takes_what_looks_at_an_open_one(name):
    """The same parameters, written out, with the same defaults; and a loss where there is one. A
    misspelt one is an error.
    """
    function, inner = getattr(ctrans, name), getattr(importlib.import_module(LOOKING[name]), name)
    given, wanted = (
        {each.name: each for each in inspect.signature(f).parameters.values()}
        for f in (function, inner)
    )
    assert given.keys() - {"loss"} == wanted.keys()
    assert [
        name
        for name in wanted
        if (given[name].kind, given[name].default) != (wanted[name].kind, wanted[name].default)
    ] == []
    text = torch.zeros(1, 3, dtype=torch.int64)
    arguments = [small_model("pre"), text, *([text] if "targets" in given else [])]
    with pytest.raises(TypeError, match="unexpected keyword argument 'sede'"):
        function(*arguments, sede=1)


def test_every_parameter_of_what_looks_at_any_model_is_explained():
    for name in LOOKING:
        function = getattr(ctrans, name)
        for parameter in inspect.signature(function).parameters:
            assert f"`{parameter}`" in function.__doc__ or f"`{parameter}(" in function.__doc__, (
                f"{name}: {parameter}"
            )


def test_functions_of_the_face_work_together():
    model = (
        GPT(GPTConfig(vocab_size=11, depth=2, width=8, heads=2, context=6))
        .double()
        .requires_grad_(False)
    )
    tokens = torch.randint(0, 11, (1, 6), generator=torch.Generator().manual_seed(0))
    assert simulate(model, tokens, method="rk4", reference=False).status.name == "SUCCESS"
    p = costate(model, tokens[:, :-1], tokens[:, 1:], form="continuous", method="tsit5").costates[1]
    assert certify("peri", p.flatten(0, -2)).agrees


def test_the_costate_of_any_module_is_autograds_gradient():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    embedding, head = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11)
    module = torch.nn.Sequential(embedding, body, head).double().eval()
    tokens = torch.randint(11, (2, 8))
    targets = tokens.roll(-1, 1)
    x = embedding(tokens).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(head(body(x)).flatten(0, 1), targets.flatten())
    (expected,) = torch.autograd.grad(loss, x)
    found = costate(module, tokens, targets, loss="next").costates[0]
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-12)
