"""What the README shows is real: its snippets run from an empty directory without a network, and
its commands print what it says.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)


def test_every_snippet_is_found():
    assert len(SNIPPETS) == TEXT.count("```python") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.split("\n")[0])
def test_a_snippet_runs_from_nothing(snippet, tmp_path):
    offline = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", snippet],
        cwd=tmp_path,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for said in re.findall(r"# (\d+\. .+)$", snippet, re.M):
        assert said in done.stdout, "a comment says what is printed"


SHOWN = [
    block.splitlines() for block in re.findall(r"^```\n(\$ ctrans .*?)^```$", TEXT, re.M | re.S)
]


def folded(text):
    return " ".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("lines", SHOWN, ids=lambda lines: lines[0].split()[2])
def test_a_command_prints_the_lines_that_are_shown(lines, tmp_path):
    (model,) = re.findall(
        r"^```python title=\"my_model.py\"\n(.*?)^```$",
        (ROOT / "docs/tutorial.md").read_text(),
        re.M | re.S,
    )
    (tmp_path / "my_model.py").write_text(model)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    printed = ""
    for command in (line.removeprefix("$ ctrans ") for line in lines if line.startswith("$")):
        arguments = [sys.executable, "-m", "ctrans", *shlex.split(command)]
        done = subprocess.run(
            arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        printed += done.stdout
    for line in lines:
        assert line.startswith("$") or folded(line) in folded(printed), line


def test_the_readme_is_short():
    assert len(SHOWN) >= 3
    assert TEXT.count("\n") <= 90
    before_the_uses, _, _ = TEXT.partition("## What you can do")
    prose = re.sub(r"^```.*?^```$", "", before_the_uses, flags=re.M | re.S)
    assert len(prose.split()) <= 260
