"""Plugins: what runs is what the digest of a result names."""

import sys

import pytest

from ctrans.cli import plugins
from tests.cli.test_users_code import forget_modules_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose modules are forgotten at the end, with no plugin loaded before."""
    monkeypatch.setattr(plugins, "LOADED", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    forget_modules_of(tmp_path)


def loaded(path):
    """The `value` of a plugin, and the digest of the plugins so far."""
    plugins.load_plugin(str(path))
    return plugins.import_named(str(path)).value, plugins.digest_of_plugins()


def test_a_second_command_in_one_process_names_the_bytes_that_run(folder):
    (folder / "helper_of_second.py").write_text("v = 1\n")
    plugin = folder / "plug_of_second.py"
    plugin.write_text("import helper_of_second as helper\nvalue = (1, helper.v)\n")
    first = loaded(plugin)
    assert first[0] == (1, 1)
    assert loaded(plugin) == first
    plugin.write_text("import helper_of_second as helper\nvalue = (2, helper.v)\n")
    assert loaded(plugin) == first
