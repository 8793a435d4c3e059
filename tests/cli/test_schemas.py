"""Every command's result is as the one documented JSON schema says, and the document is the one
that the classes give.
"""

import copy
from pathlib import Path

import jsonschema
import pytest
import torch

from ctrans.cli import COMMANDS, OLD_COMMANDS
from ctrans.measure.measures import MEASURES
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.report.contents import page_of
from ctrans.report.html import render
from ctrans.training.monitor import Monitor
from docs._site.json_schema import schema_of
from docs._site.schemas import DOCUMENT, as_text, schema
from tests.cli.test_commands import run, strict

SMALL = ["--depth", "1", "--width", "16", "--heads", "2", "--context", "8", "--batch", "1"]
RUNS = {
    "simulate": [["simulate", "--placement", "pre", "--placement", "peri", *SMALL]],
    "convergence": [
        ["convergence", "--limit", "substeps", "--method", "heun", "--placement", "peri"]
    ],
    "hjb-check": [
        [
            "hjb-check",
            "--norm",
            "layernorm",
            "--placement",
            "pre",
            "--placement",
            "peri",
            "--placement",
            "post",
            *SMALL,
        ],
        [
            "hjb-check",
            "--norm",
            "rmsnorm",
            "--placement",
            "pre",
            "--placement",
            "peri",
            "--last-map-decay",
            "0.1",
            *SMALL,
        ],
    ],
    "control": [
        ["control", "--placement", "pre", "--placement", "peri", *SMALL],
        ["control", "--checkpoint", "DYING"],
    ],
    "diagnose": [
        ["diagnose", "--checkpoint", "DYING", "--seeds", "2"],
        ["diagnose", "--weight-decay", "1e-9", *SMALL],
    ],
    "screen": [
        ["screen", "--quick", *SMALL],
        ["screen", "--checkpoint", "DYING", "--quick", "--batch", "1"],
    ],
    "compare": [["compare", "--checkpoint", "DYING", "--checkpoint", "OTHER", "--batch", "1"]],
    "coordinate-check": [
        [
            "coordinate-check",
            "--depth",
            "1",
            "--context",
            "8",
            "--batch",
            "2",
            "--widths",
            "16",
            "--widths",
            "32",
        ]
    ],
    "export": [["export", "--checkpoint", "LLAMA", "--out", "EXPORTED"]],
    "verify": [["verify", "--only", "lemma-9", "--cases", "5"]],
    "generate": [["generate", "--checkpoint", "DYING", "--tokens", "2"]],
    "study": [
        ["study", "STUDY", "--workers", "1", "--out", "STUDIED"],
        ["study", "STUDY", "--dry-run"],
    ],
    "watch": [["watch", "WATCHED"]],
    "report": [["report", "KEPT"]],
    "train": [
        [
            "train",
            "--iterations",
            "2",
            "--eval-every",
            "1",
            "--eval-windows",
            "1",
            "--out",
            "RUN",
            *SMALL,
        ]
    ],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    model = GPT(
        GPTConfig(
            depth=1,
            width=16,
            heads=2,
            context=12,
            placement="post",
            embedding_std=0.2,
            initialisation="xavier",
        )
    )
    model.depth.sublayers[1].state_norm.weight.data[5] = 4.8e-33
    place = tmp_path_factory.mktemp("schemas")
    save(model, place / "model")
    llama = GPTConfig(
        depth=1,
        width=16,
        heads=2,
        placement="pre",
        norm="rmsnorm",
        positions="rotary",
        ffn="swiglu",
        bias=False,
    )
    save(GPT(llama), place / "llama")
    changed = copy.deepcopy(model)
    changed.token_embedding.weight.data *= 1.1
    save(changed, place / "other")
    (place / "study.toml").write_text(
        "[base]\ndepth = 1\nwidth = 16\nheads = 2\ncontext = 8\niterations = 2\neval_windows ="
        " 1\n[vary]\ndt = [1.0, 0.1]\n"
    )
    (place / "kept.json").write_text('{"command": "simulate", "placements": {}}')
    monitor = Monitor(
        model, every=1, out=place / "watched", limits={"updates too large": {"limit": 0.0}}
    )
    for _ in range(3):
        tokens = torch.randint(256, (2, 9))
        model.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        monitor.step(loss, torch.optim.SGD(model.parameters(), lr=0.1))
        model.token_embedding.weight.data *= 1.1
    monitor.close()
    made = {
        name: str(place / name.lower())
        for name in ("LLAMA", "EXPORTED", "RUN", "STUDIED", "WATCHED")
    }
    return made | {
        "DYING": str(place / "model"),
        "OTHER": str(place / "other"),
        "KEPT": str(place / "kept.json"),
        "STUDY": str(place / "study.toml"),
    }


def test_every_command_is_run():
    assert {*COMMANDS, *OLD_COMMANDS} == RUNS.keys()


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", [*COMMANDS, *OLD_COMMANDS])
def test_a_result_is_as_the_schema_says(name, places):
    checker = jsonschema.Draft202012Validator(schema())
    checker.check_schema(schema())
    for args in RUNS[name]:
        result = run(*(places.get(arg, arg) for arg in args), "--json", "-")
        assert result.exit_code == 0, result.output
        kept = strict(result.stdout)
        assert f"ctrans {name}" in render(page_of({name: kept})), "it has a page"
        if name != "report":
            checker.validate(kept)
            assert set(kept["measured"]["values"]["measure"]) <= set(MEASURES), "each has an entry"
            with pytest.raises(jsonschema.ValidationError):
                checker.validate({**kept, "measured": {**kept["measured"], "more": 1}})


def test_the_document_is_the_schema():
    assert DOCUMENT.read_text() == as_text(), "python -m docs._site.schemas"
    assert [path.name for path in DOCUMENT.parent.iterdir()] == [DOCUMENT.name]


def test_a_field_that_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="no JSON schema"):
        schema_of(bytes | Path)
