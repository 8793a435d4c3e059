"""A request is made once, of click's parameters, and is what a command reads."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import click
import pytest

from ctrans.base.option import Range, option, options_of
from ctrans.cli import COMMANDS
from ctrans.cli.click_options import settings_in, settings_of
from ctrans.cli.comparison import SETTINGS, values_of
from ctrans.cli.model_request import ModelRequest
from ctrans.cli.model_sources import find_models, resolved
from ctrans.cli.request import Request, command_of
from ctrans.dynamics.norm import NORMS
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.study.description import MODEL
from solvers import ConfigError


def asked(*args):
    """What a command that looks at models would be asked by these words."""
    seen = []
    command = command_of(ModelRequest, "look")(seen.append)
    command.main([str(arg) for arg in args], standalone_mode=False)
    return seen[0]


def test_a_request_knows_what_was_typed_and_cannot_be_changed():
    request = asked("--width", "8", "--tokens", "5", "--placement", "pre")
    assert (
        request.command,
        request.config["width"],
        request.context,
        request.placements,
        request.norms,
    ) == (
        *("look", 8, 5),
        ("pre",),
        ("layernorm",),
    )
    assert request.typed == {"width", "context", "placements"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.seed = 3
    with pytest.raises(TypeError):
        request.options["width"] = 3
    assert request.shown(width=9)["width"] == 9
    assert request.config["width"] == request.options["width"] == 8


def test_finding_a_model_leaves_the_request_as_it_was(tmp_path):
    save(
        GPT(GPTConfig(depth=1, width=16, heads=2, context=12, placement="output", norm="rmsnorm")),
        tmp_path,
    )
    request = asked("--checkpoint", tmp_path, "--context", "99")
    before = dict(request.options)
    (source,) = find_models(request)
    assert dict(request.options) == before
    assert (
        source.context,
        source.longest,
        source.segments,
        source.config.width,
        source.trained,
    ) == (12, 12, 2, 16, True)
    assert resolved([source])["norm"] == "rmsnorm"
    assert request.context == 99


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_field_of_a_request_is_an_option_of_its_command(name):
    """So that a request can be made of what click gives: options and fields are called alike."""
    module = importlib.import_module(f"ctrans.cli.{name.replace('-', '_')}")
    kinds = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Request)
    ]
    kind = max(kinds, key=lambda each: len(each.__mro__))
    context = click.Context(module.command)
    context.params = {parameter.name: None for parameter in module.command.params}
    settings = settings_in(kind)
    fields = {field.name for field in dataclasses.fields(kind)} - {
        "command",
        "options",
        "typed",
        *settings,
    }
    assert fields | {name for names in settings.values() for name in names} == context.params.keys()


@pytest.mark.parametrize(
    "name",
    ["simulate", "hjb-check", "control", "diagnose", "screen", "train", "coordinate-check"],
)
def test_every_option_of_an_architecture_is_one_of_the_command(name):
    module = importlib.import_module(f"ctrans.cli.{name.replace('-', '_')}")
    flags = {flag for parameter in module.command.params for flag in parameter.opts}
    assert {about.flag(field) for field, about in options_of(GPTConfig).items()} <= flags


def test_a_new_field_is_an_option_by_being_there():
    """As a field of the architecture or of a request, with its type, limits and default."""

    @dataclasses.dataclass(frozen=True)
    class Larger(GPTConfig):
        sparsity: float = option(
            0.5, "How sparse.", group="Attention", limits=Range(0, 1, "a number from 0 to 1")
        )

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Asking(Request):
        config: Any = settings_of(Larger)

    seen = []
    command_of(Asking, "ask")(seen.append).main(["--sparsity", "0.25"], standalone_mode=False)
    assert Larger(**seen[0].config).sparsity == 0.25
    assert seen[0].shown()["sparsity"] == 0.25
    with pytest.raises(ConfigError, match=r"sparsity = 2: give a number from 0 to 1"):
        Larger(sparsity=2)


def test_what_screen_compares_and_studies_vary_are_the_options_of_an_architecture():
    assert set(SETTINGS.values()) == set(options_of(GPTConfig)) <= MODEL
    assert SETTINGS["init"] == "initialisation"
    assert values_of("window", "none,2") == {"none": None, 2: 2}
    assert values_of("qk-norm", "none,l2") == {"none": False, "l2": "l2"}
    assert values_of("sinks", "yes") == {"yes": True}
    assert list(values_of("norm", "all")) == list(NORMS)
    assert values_of("heads", "2,4") == {2: 2, 4: 4}


def test_an_option_is_named_in_few_files():
    """Its field and what it does there: no list of options is kept elsewhere."""
    ctrans = Path(importlib.import_module("ctrans").__file__).parent
    named = {path.name for path in ctrans.rglob("*.py") if "stack_steps" in path.read_text()}
    assert named <= {
        "blocks.py",
        "config.py",
        "config_checks.py",
        "stack.py",
        "gpt.py",
        "start_from.py",
        "ot_transformer.py",
        "run_key.py",
    }
