"""What the README tells a newcomer to type into Python runs as it stands, from an empty directory and without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)


def test_every_snippet_is_found():
    assert len(SNIPPETS) == TEXT.count("```python") >= 3


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.split("\n")[0])
def test_a_snippet_runs_from_nothing(snippet, tmp_path):
    offline = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
