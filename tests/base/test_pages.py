"""Huge pages are asked for where the system gives them on request, and nowhere else."""

import subprocess
import sys
from pathlib import Path

import pytest

from ctrans.base import pages

TELL = """
import os, sys
from pathlib import Path
from ctrans.base import pages
pages.take_huge_pages(Path(sys.argv[1]))
import torch
large = torch.ones(1 << 24)
with open("/proc/self/smaps") as smaps:
    print(os.environ.get(pages.SWITCH), sum(int(line.split()[1]) for line in smaps if line.startswith("AnonHugePages")))
"""


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("always [madvise] never", "1"),
        ("[always] madvise never", None),
        ("always madvise [never]", None),
    ],
)
def test_asked_for_where_the_system_gives_them_on_request(says, expected, tmp_path, monkeypatch):
    monkeypatch.delenv(pages.SWITCH, raising=False)
    monkeypatch.setattr(pages.os, "environ", {})
    (tmp_path / "enabled").write_text(says)
    pages.take_huge_pages(tmp_path / "enabled")
    assert pages.os.environ.get(pages.SWITCH) == expected
    pages.os.environ[pages.SWITCH] = "0"
    pages.take_huge_pages(tmp_path / "enabled")
    assert pages.os.environ[pages.SWITCH] == "0"


def test_a_system_that_does_not_say_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(pages.os, "environ", {})
    pages.take_huge_pages(tmp_path / "none")
    assert not pages.os.environ


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(pages.SETTING).exists() and "[madvise]" in Path(pages.SETTING).read_text()),
    reason="the system does not give them on request",
)
def test_a_large_tensor_lies_on_huge_pages():
    """64 MiB, most of which the system says are huge pages."""
    done = subprocess.run(
        [sys.executable, "-c", TELL, str(pages.SETTING)], capture_output=True, text=True, check=True
    )
    switch, kilobytes = done.stdout.split()
    assert switch == "1"
    assert int(kilobytes) > 32 << 10
