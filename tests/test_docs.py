"""The site says what runs: every code block of every page, in order, from an empty directory and
without a network.
"""

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml

import ctrans
from ctrans.cli import COMMANDS, main
from ctrans.study.study_file import read_study
from docs._site.gallery import OUTPUTS, PICTURES, about, heading, others
from docs._site.tables import TABLES

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "gallery.md")
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXTRAS = {"--html ": "plotly", "ctrans report ": "plotly", "import transformers": "transformers"}
"""What code needs that an install without extras does not have. Such a page names the extra."""
OFFLINE = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def blocks(page):
    return BLOCK.findall(page.read_text())


def ran(arguments, place):
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": f"{ROOT}{os.pathsep}{place}"}
    done = subprocess.run(
        arguments, cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem
)
def test_a_pages_code_runs(page, tmp_path):
    """Files that a page names are written, Python is run, and so is each command; a block of no
    language is for reading.
    """
    run = "\n".join(code for language, _, code in blocks(page) if language in ("python", "sh"))
    for words, package in EXTRAS.items():
        if words in run:
            pytest.importorskip(package, reason=f"{page.name} needs {package}, which is not here")
    for language, title, code in blocks(page):
        if title:
            (tmp_path / title).write_text(code)
        elif language == "python":
            ran([sys.executable, "-c", code], tmp_path)
        elif language == "sh":
            for line in code.strip().splitlines():
                ran([sys.executable, "-m", *shlex.split(line)], tmp_path)


def shown_commands(page):
    """The arguments of each `ctrans` that a page shows or runs, lines that end in a backslash
    joined.
    """
    for language, _, code in blocks(page):
        for line in (
            code.replace("\\\n", " ").splitlines() if language in ("", "sh", "yaml") else ()
        ):
            if called := re.search(
                r"(?:^|^\S+/|^torchrun .*-m |^\W*(?:run|entry): )ctrans (.*)", line
            ):
                yield shlex.split(called[1], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_only_shown_are_understood(page, monkeypatch):
    """They may need hours, or files of the reader's; but each option is one, and takes what it is
    given.
    """
    monkeypatch.setattr("ctrans.cli.plugins.import_named", lambda value: None)
    for arguments in shown_commands(page):
        while arguments[0] == "--plugin":
            arguments = arguments[2:]
        if not arguments[0].startswith("-"):
            assert arguments[0] in COMMANDS, arguments
            main.get_command(click.Context(main), arguments[0]).make_context(
                arguments[0], list(arguments[1:])
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_run_or_read_by_a_test(page, tmp_path):
    """Python and sh are run, commands in blocks of no language understood, TOML read; `text` is for
    another shell.
    """
    for language, title, code in blocks(page):
        assert language in ("", "python", "sh", "toml", "text", "yaml"), language
        if language == "yaml":
            assert yaml.safe_load(code)
        if language == "toml":
            (tmp_path / title).write_text(code)
            if "learning_rates" in tomllib.loads(code):
                assert read_study(tmp_path / title).base
        if language == "":
            assert "ctrans" in code or page.name == "diagnose.md", code


def test_the_gallery_shows_or_names_every_example():
    """What they printed is made by `make gallery`."""
    text = (ROOT / "docs" / "gallery.md").read_text()
    for name in (*PICTURES, *OUTPUTS):
        for part in (heading, about):
            assert "\n".join(part(ROOT / "examples" / name)) in text, f"{name}: make gallery"
    assert "\n".join(others()) in text, "make gallery"


def test_every_picture_has_the_command_that_draws_it():
    text = (ROOT / "docs" / "_site" / "pictures.py").read_text()
    for path in sorted((ROOT / "examples" / "pictures").glob("*.png")):
        assert f'"{path.stem}": (' in text, path.name


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_tables_of_today(name):
    """`python -m docs._site.tables` writes them."""
    page = (ROOT / "docs" / name).read_text()
    for table in TABLES[name]:
        assert table.strip() in page


def test_every_page_is_in_the_navigation_and_back():
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def referred():
    """What the reference describes, by its name there."""
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            module, parts = name, []
            while True:
                try:
                    found = importlib.import_module(module)
                    break
                except ModuleNotFoundError:
                    module, _, last = module.rpartition(".")
                    parts.insert(0, last)
            for part in parts:
                found = getattr(found, part)
            yield name, found


def test_the_reference_names_what_there_is_and_all_of_the_face():
    there = dict(referred())
    assert [name for name, each in there.items() if not each.__doc__] == []
    assert [
        name
        for name in ctrans.__all__
        if not any(
            inspect.unwrap(getattr(ctrans, name)) is inspect.unwrap(each) for each in there.values()
        )
    ] == []


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ctrans.__all__
        if not (name.isupper() and name != "GPT") and not name.endswith("Error")
    ],
)
def test_parameters_of_the_face_have_types(name):
    """Which the reference shows."""
    parameters = inspect.signature(getattr(ctrans, name)).parameters.values()
    assert [each.name for each in parameters if each.annotation is each.empty] == []
