"""The site says what runs: every code block of every page, in order, from an empty directory and without a network."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ctrans.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "gallery.md")
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OFFLINE = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def blocks(page):
    return BLOCK.findall(page.read_text())


def ran(arguments, place):
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": f"{ROOT}{os.pathsep}{place}"}
    done = subprocess.run(arguments, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_a_pages_code_runs(page, tmp_path):
    """Files that a page names are written, Python is run, and so is each command; a block of no language is for reading."""
    for language, title, code in blocks(page):
        if title:
            (tmp_path / title).write_text(code)
        elif language == "python":
            ran([sys.executable, "-c", code], tmp_path)
        elif language == "sh":
            for line in code.strip().splitlines():
                ran([sys.executable, "-m", *shlex.split(line)], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_only_shown_exist(page):
    for language, _, code in blocks(page):
        for line in code.splitlines() if language in ("", "sh") else ():
            if re.match(r"(\S*/)?ctrans ", line):
                words = shlex.split(line.rstrip("\\"), comments=True)
                named = words[3] if words[1] == "--plugin" else words[1]
                assert named in COMMANDS, line


def test_every_page_is_in_the_navigation_and_back():
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_the_reference_names_what_there_is():
    import importlib

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
            assert found.__doc__, name
