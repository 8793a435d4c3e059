"""Facts about the project that stand in one place, where tools have them in several."""

import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import ctrans
from ctrans.cli import COMMANDS
from tests.campaigns.wrong_requests import QUICK, SLOW
from tests.cases import covering

ROOT = Path(__file__).parents[1]


def test_the_version_stands_in_the_package_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ctrans.__version__"}
    # a literal, which setuptools reads without importing torch
    assert re.search(
        rf'^__version__ = "{re.escape(ctrans.__version__)}"$',
        (ROOT / "ctrans" / "__init__.py").read_text(),
        re.M,
    )
    assert f"## [{ctrans.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_command_says_its_version_from_a_bare_source_tree():
    done = subprocess.run(
        [sys.executable, "-m", "ctrans", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"ctrans, version {ctrans.__version__}\n"


def test_pre_commit_runs_what_make_lint_runs():
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    hooks = re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    assert hooks == [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]


def test_no_check_for_undefined_names_is_off():
    """Neither mypy's nor ruff's, for any file; a check that is off for all of F or for all errors
    is off for these.
    """
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    mypy, lint = tools["mypy"], tools["ruff"]["lint"]
    assert {"disable_error_code", "ignore_errors", "overrides", "exclude"} & mypy.keys() == set()
    assert "F" in lint["select"]
    ignored = [
        *lint.get("ignore", ()),
        *itertools.chain(*lint.get("per-file-ignores", {}).values()),
    ]
    assert [code for code in ignored if "F821".startswith(code)] == []
    for path in (
        path for package in ("solvers", "ctrans") for path in (ROOT / package).rglob("*.py")
    ):
        assert not re.search(
            r"noqa: .*F821|noqa *$|ignore\[.*name-defined|# mypy:", path.read_text(), re.M
        ), path


def test_cases_that_are_always_run_meet_every_value():
    pairs = [{"method": i, "placement": j} for i in range(4) for j in range(7)]
    chosen = [pairs[place] for place in covering(pairs)]
    assert len(chosen) == 7
    assert {each["method"] for each in chosen} == set(range(4))
    assert {each["placement"] for each in chosen} == set(range(7))
    assert covering([{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 0}]) == [0, 2]
    assert covering([]) == []


@pytest.mark.slow
def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(tmp_path):
    """There a folder called ctrans is a namespace package to Python, which hides what an import
    hook would find, but no path.
    """
    backend = pytest.importorskip("setuptools.build_meta")
    clone = tmp_path / "ctrans"
    for package in ("ctrans", "solvers"):
        (clone / package).mkdir(parents=True)
        (clone / package / "__init__.py").write_text((ROOT / package / "__init__.py").read_text())
    (clone / "ctrans" / "base").mkdir()
    for name in (
        "ctrans/base/__init__.py",
        "ctrans/base/old_names.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    assert backend is not None
    build = "import setuptools.build_meta as b; print(b.build_editable('built'))"
    (clone / "built").mkdir()
    made = subprocess.run(
        [sys.executable, "-c", build], cwd=clone, capture_output=True, text=True, check=True
    )
    site = tmp_path / "site"
    with zipfile.ZipFile(clone / "built" / made.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    use = f"import site; site.addsitedir({str(site)!r}); import ctrans; print(ctrans.__version__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", use],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={},
    )
    assert done.stdout == f"{ctrans.__version__}\n", done.stderr


def test_an_environment_that_is_a_link_is_ignored_too():
    """Merging a committed link of this name removes the environment in its place, file by file."""
    assert ".venv" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_campaign_of_wrong_requests_asks_every_command():
    assert set(QUICK) == set(COMMANDS)
    assert set(COMMANDS) >= SLOW
