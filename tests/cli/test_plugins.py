"""Plugins: what runs is what the digest of a result names."""

import py_compile
import sys

import click
import pytest

from ctrans.cli import plugins
from tests.cli.test_users_code import digest_and_value, edited, forget_modules_of


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


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


SOURCES = ["import helper_of_two\n", "def function():\n    import helper_of_two\n"]


@pytest.mark.parametrize("source", SOURCES)
def test_two_plugins_with_helpers_of_one_name_are_refused(source, folder):
    """Also if the second one imports it inside of a function, which runs later."""
    for name in ("first", "second"):
        written(folder / name / "helper_of_two.py", f"v = {name!r}\n")
    plugins.load_plugin(str(written(folder / "first" / "plug.py", SOURCES[0])))
    later = written(folder / "second" / "plug.py", source)
    with pytest.raises(click.BadParameter, match=r"'helper_of_two' is .*first.*: rename one"):
        plugins.load_plugin(str(later))
    unrelated = written(folder / "second" / "other.py", "import os.path\nvalue = 1\n")
    assert loaded(unrelated)[0] == 1
    beside = written(folder / "first" / "other.py", "import helper_of_two as h\nvalue = h.v\n")
    assert loaded(beside)[0] == "first"


@pytest.mark.parametrize("linked", ["helper_of_link.py", "helper_of_link"])
def test_a_helper_that_is_a_link_to_elsewhere_is_in_the_digest(linked, folder, monkeypatch):
    elsewhere = folder / "elsewhere" / "helper"
    text = "value = 1\n"
    if linked.endswith(".py"):
        elsewhere = target = written(elsewhere.with_suffix(".py"), text)
    else:
        target = written(elsewhere / "__init__.py", text)
    plugin = written(folder / "own" / "plug.py", "from helper_of_link import value\n")
    (folder / "own" / linked).symlink_to(elsewhere)
    first = digest_and_value(str(plugin), monkeypatch, folder)
    edited(target, "value = 2\n")
    second = digest_and_value(str(plugin), monkeypatch, folder)
    assert (first[1], second[1]) == (1, 2)
    assert first[0] != second[0]


def test_a_compiled_helper_is_in_the_digest(folder, monkeypatch):
    plugin = written(folder / "plug.py", "from helper_of_bytes import value\n")
    seen = []
    for value in (1, 2):
        source = written(folder / "source.txt", f"value = {value}\n")
        py_compile.compile(str(source), str(folder / "helper_of_bytes.pyc"))
        sys.path_importer_cache.clear()
        seen.append(digest_and_value(str(plugin), monkeypatch, folder))
    assert [value for _, value in seen] == [1, 2]
    assert seen[0][0] != seen[1][0]


@pytest.mark.parametrize("at", ["plug_of_null.py", "helper_of_null.py"])
def test_a_null_byte_in_a_plugin_is_named_with_its_place(at, folder):
    plugin = written(folder / "plug_of_null.py", "import helper_of_null\n")
    written(folder / "helper_of_null.py", "v = 1\n")
    (folder / at).write_bytes(b"v = 1\nw = '\0'\n")
    with pytest.raises(click.BadParameter, match=rf"failed at .*{at}, line 2: SyntaxError"):
        plugins.load_plugin(str(plugin))


def test_a_plugin_is_imported_where_the_directory_is_gone(folder, monkeypatch):
    plugin = written(folder / "plug_of_gone.py", "value = 1\n")
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert loaded(plugin)[0] == 1


def test_a_plugin_is_imported_where_stdout_is_closed(folder, monkeypatch):
    """As in the processes of a study, whose parent has none."""
    plugin = written(folder / "plug_of_closed.py", "print('said')\nvalue = 1\n")
    monkeypatch.setattr(sys, "stdout", None)
    assert loaded(plugin)[0] == 1
