"""A request is made once, of click's parameters, and is what a command reads."""

import dataclasses
import importlib

import click
import pytest

from ctrans.cli import COMMANDS
from ctrans.cli.click_options import settings_in
from ctrans.cli.model_sources import find, resolved
from ctrans.cli.request import ModelRequest, Request, command_of
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT


def asked(*args):
    """What a command that looks at models would be asked by these words."""
    seen = []
    command = command_of(ModelRequest, "look")(seen.append)
    command.main([str(arg) for arg in args], standalone_mode=False)
    return seen[0]


def test_a_request_knows_what_was_typed_and_cannot_be_changed():
    request = asked("--width", "8", "--tokens", "5", "--placement", "pre")
    assert (request.command, request.config["width"], request.context, request.placements, request.norms) == (
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
    save(GPT(GPTConfig(depth=1, width=16, heads=2, context=12, placement="output", norm="rmsnorm")), tmp_path)
    request = asked("--checkpoint", tmp_path, "--context", "99")
    before = dict(request.options)
    (subject,) = find(request)
    assert dict(request.options) == before
    assert (subject.context, subject.longest, subject.blocks, subject.width, subject.trained) == (12, 12, 1, 16, True)
    assert resolved([subject])["norm"] == "rmsnorm"
    assert request.context == 99


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_field_of_a_request_is_an_option_of_its_command(name):
    """So that a request can be made of what click gives: options and fields are called alike."""
    module = importlib.import_module(f"ctrans.cli.{name.replace('-', '_')}")
    kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Request)]
    kind = max(kinds, key=lambda each: len(each.__mro__))
    context = click.Context(module.command)
    context.params = {parameter.name: None for parameter in module.command.params}
    settings = settings_in(kind)
    fields = {field.name for field in dataclasses.fields(kind)} - {"command", "options", "typed", "several", *settings}
    assert fields | {name for names in settings.values() for name in names} == context.params.keys()
