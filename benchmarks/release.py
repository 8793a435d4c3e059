"""Checks what must hold before a version is released, and publishes nothing: `make release-check`.

python benchmarks/release.py [--cuda] [--python PATH ...] [--quick] [--sign KEY]

- State: the version has a dated entry in the changelog, nothing is under Unreleased, the tree is
  clean, and the tag is free.
- Build: the sdist, and the wheel from it, in isolation. The wheel has the packages' files that git
  tracks, and no others.
- Installs: for each Python, in an empty environment, with three versions of torch: the lowest that
  pyproject.toml allows, the one of constraints.txt, and the newest of the index. Then what a
  newcomer types. If only a CUDA build of gigabytes fits, the script resolves it, and installs it
  only with --cuda. Everything in requirements.lock is installed by its hash. --quick tries one
  Python, with the torch of constraints.txt alone.
- Supply chain: pip-audit of the locked packages and torch; a CycloneDX SBOM of an environment with
  the wheel; SHA-256 sums of sdist, wheel and SBOM; with --sign, their signature by an SSH key,
  verified. All of it is left in out/release/VERSION.

The exit code is 1 if a check fails. The script names what it could not try. That is no failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from ctrans.base.threads import wait_passively

wait_passively()

import ctrans
from benchmarks.lock import LOCK, NAME
from benchmarks.record import keep

PYTHONS = ("3.11", "3.12", "3.13")
SMALL = ["--depth", "1", "--width", "8", "--heads", "2", "--context", "4", "--batch", "1"]
FACE = (
    "import ctrans, solvers; assert all(getattr(ctrans, name) is not None for name in"
    " ctrans.__all__); print(len(ctrans.__all__))"
)
TRIED = {
    "ctrans --version": ["ctrans", "--version"],
    "python -m ctrans --version": ["python", "-m", "ctrans", "--version"],
    "simulate": [
        "ctrans",
        "simulate",
        "--placement",
        "peri",
        "--dt",
        "0.1",
        *SMALL,
        "--html",
        "simulate.html",
    ],
    "hjb-check": ["ctrans", "hjb-check", "--placement", "peri", *SMALL],
    "import of the face": ["python", "-c", FACE],
}
"""What is run where the wheel is installed, from an empty directory."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = ("build", "twine", "pip-audit", "cyclonedx-bom")
SUMS = "SHA256SUMS"
NAMESPACE = "file"
"""What the signature is for, as `ssh-keygen -Y` asks."""
Seen = tuple[bool | None, str]
"""Whether a check holds, None where it could not be tried, and what was seen."""


class CommandError(Exception):
    """A command that ended badly, with the end of what it said."""


def run(
    arguments: list[str],
    place: Path = ROOT,
    *,
    given: str | None = None,
    may_end: tuple[int, ...] = (0,),
    **environment: str,
) -> str:
    """What a command prints, with nothing of this process's Python in its environment, and `given`
    as its input. Raises CommandError.
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        arguments,
        cwd=place,
        env={**clean, **environment},
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in may_end:
        raise CommandError(
            f"{' '.join(arguments[:6])}: exit code {done.returncode}:"
            f" {(done.stderr or done.stdout).strip()[-400:]}"
        )
    return done.stdout


def state() -> Iterator[tuple[str, bool, str]]:
    """What has to be so in the repository: what was looked at, whether it holds, what was seen."""
    version, changes = ctrans.__version__, (ROOT / "CHANGELOG.md").read_text()
    entry = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", changes, re.M)
    yield (
        f"changelog has {version}",
        entry is not None,
        f"dated {entry[1]}" if entry else "no dated entry",
    )
    waiting = re.search(r"^## \[Unreleased\]\n(.*?)^## \[", changes, re.M | re.S)
    count = len(re.findall(r"^- ", waiting[1], re.M)) if waiting else 0
    yield (
        "nothing is unreleased",
        count == 0,
        f"{count} entries stand under Unreleased: raise the version" if count else "",
    )
    changed = run(["git", "status", "--porcelain"]).splitlines()
    yield "clean tree", not changed, f"{len(changed)} files differ" if changed else ""
    tagged = bool(run(["git", "tag", "--list", f"v{version}"]).strip())
    yield f"tag v{version} is free", not tagged, "it is taken: raise the version" if tagged else ""


def built(place: Path) -> tuple[Path, Path]:
    """sdist and wheel, made of a clone of the last commit, so that nothing untracked gets in."""
    run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(place / "clone")])
    tools = place / "tools"
    run([sys.executable, "-m", "venv", str(tools)])
    run([str(tools / "bin/pip"), "install", "--quiet", *TOOLS])
    run(
        [
            str(tools / "bin/python"),
            "-m",
            "build",
            "--outdir",
            str(place / "dist"),
            str(place / "clone"),
        ]
    )
    (wheel,), (sdist,) = (place / "dist").glob("*.whl"), (place / "dist").glob("*.tar.gz")
    return sdist, wheel


def contents(sdist: Path, wheel: Path, place: Path) -> Iterator[tuple[str, bool, str]]:
    """What is in them: of the wheel exactly the packages' tracked files, of the sdist all that the
    tests need.
    """
    tracked = set(run(["git", "ls-files"], place / "clone").splitlines())
    own = {name for name in tracked if name.split("/")[0] in ("ctrans", "solvers")}
    with zipfile.ZipFile(wheel) as archive:
        inside = {
            name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")
        }
        metadata = next(
            archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")
        )
    differs = sorted(own ^ inside)
    data = sorted(name for name in inside if not name.endswith(".py"))
    size = (
        f"{wheel.stat().st_size / 1e3:.0f} kB, {len(inside)} files, of them no code:"
        f" {', '.join(data)}"
    )
    yield (
        "wheel holds the packages and no more",
        not differs,
        f"these differ: {', '.join(differs[:9])}" if differs else size,
    )
    extras = set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.M))
    wanted = {"hf", "ray", "report", "docs"}
    yield "extras", wanted <= extras, ", ".join(sorted(extras))
    with tarfile.open(sdist) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    lost = sorted(
        name
        for name in tracked - names
        if not name.startswith((".", "benchmarks/results/", "docs/pictures/"))
    )
    kept = f"{sdist.stat().st_size / 1e3:.0f} kB, {len(names)} files"
    yield (
        "sdist holds the sources, tests and schemas",
        not lost,
        f"{len(lost)} are not: {', '.join(lost[:9])}" if lost else kept,
    )
    run([str(place / "tools/bin/twine"), "check", "--strict", str(sdist), str(wheel)])
    yield "twine check --strict", True, ""


def audited(pip_audit: Path, place: Path) -> Seen:
    """Whether an advisory service knows of faults in the locked packages and torch. It says of
    which it has no answer.

    Of a package that has two versions, by Python, each is looked up.
    """
    pinned = [f"{name}=={version}" for name, version in NAME.findall(LOCK.read_text())] + [
        torches()["tested"]
    ]
    first = {each.partition("==")[0]: each for each in reversed(pinned)}
    found: list[dict[str, Any]] = []
    for which in (first.values(), [each for each in pinned if each not in first.values()]):
        (place / "audited.txt").write_text("\n".join(which))
        asked = [
            "--no-deps",
            "--disable-pip",
            "--requirement",
            "audited.txt",
            "--format",
            "json",
            "--progress-spinner",
            "off",
        ]
        try:
            said = (
                run([str(pip_audit), *asked], place, may_end=(0, 1))
                if which
                else '{"dependencies": []}'
            )
            found += json.loads(said)["dependencies"]
        except (CommandError, ValueError):
            return None, "could not be tried: pip-audit ended without an answer of its service"
    faults = [f"{each['name']} {fault['id']}" for each in found for fault in each.get("vulns", ())]
    skipped = [each for each in found if "skip_reason" in each]
    answered = f"{len(found) - len(skipped)} of {len(found)} packages are known to the service"
    if faults:
        return False, f"{len(faults)} known faults: {', '.join(faults[:9])}"
    if skipped:
        return None, f"could not be tried in full: {answered}; {skipped[0]['skip_reason']}"
    return True, f"no known fault; {answered}"


def bill_of_materials(cyclonedx: Path, python: Path, target: Path) -> Seen:
    """Writes what an environment has, as CycloneDX JSON. It has to have ctrans and what the wheel
    depends on. Raises CommandError.
    """
    run(
        [
            str(cyclonedx),
            "environment",
            "--output-format",
            "JSON",
            "--output-reproducible",
            "--output-file",
            str(target),
            str(python),
        ]
    )
    made = json.loads(target.read_text())
    for each in made["components"]:  # where the wheel lay on this machine
        each["externalReferences"] = [
            link
            for link in each.get("externalReferences", ())
            if not link["url"].startswith("file:")
        ]
    target.write_text(json.dumps(made, indent=2) + "\n")
    listed = {
        each["name"].lower().replace("_", "-"): each.get("version") for each in made["components"]
    }
    needed = {re.split(r"[^\w-]", each)[0].lower() for each in PROJECT["dependencies"]}
    lost = sorted(needed - listed.keys()) + (
        [] if listed.get("ctrans") == ctrans.__version__ else ["ctrans"]
    )
    words = f"{target.name}: {made['bomFormat']} {made['specVersion']}, {len(listed)} components"
    return not lost, f"{words}, without {', '.join(lost)}" if lost else words


def sums(directory: Path) -> str:
    """The SHA-256 of each file but sums and signatures, in the format of `sha256sum`."""
    files = sorted(
        path for path in directory.iterdir() if path.is_file() and not path.name.startswith(SUMS)
    )
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files
    )


def signed(directory: Path, key: Path | None) -> Seen:
    """Signs the sums by the releaser's SSH key, and verifies them; sums that differ must not pass.
    Raises CommandError.
    """
    if key is None:
        return None, "no key was given: --sign PATH of an SSH key"
    if shutil.which("ssh-keygen") is None:
        return None, "there is no ssh-keygen here"
    text, signature = (directory / SUMS).read_text(), directory / f"{SUMS}.sig"
    signature.unlink(missing_ok=True)
    run(["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(directory / SUMS)])
    public = key if key.suffix == ".pub" else key.with_name(f"{key.name}.pub")
    signers = directory / "allowed_signers"
    signers.write_text(f"ctrans {' '.join(public.read_text().split()[:2])}\n")
    check = [
        "ssh-keygen",
        "-Y",
        "verify",
        "-f",
        str(signers),
        "-I",
        "ctrans",
        "-n",
        NAMESPACE,
        "-s",
        str(signature),
    ]
    said = run(check, given=text).strip()
    try:
        run(check, given=text.replace(text[0], "1" if text[0] == "0" else "0", 1))
    except CommandError:
        return True, said
    return False, "other sums pass with this signature"


def interpreters(given: list[str]) -> dict[str, str | None]:
    """Each Python by its version: of those given, on the path, or of pyenv; None for what is not to
    be had.
    """
    candidates = [
        *given,
        *(found for version in PYTHONS if (found := shutil.which(f"python{version}"))),
    ]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [
        str(path) for version in PYTHONS for path in sorted(pyenv.glob(f"{version}.*/bin/python"))
    ]
    found: dict[str, str | None] = dict.fromkeys(PYTHONS)
    for candidate in candidates:
        try:
            version = run(
                [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            ).strip()
        except (CommandError, OSError):  # a shim for a version that is not chosen
            continue
        if version in found and found[version] is None:
            found[version] = candidate
    return found


def torches() -> dict[str, str]:
    """What pip is asked for, by what it is."""
    (asked,) = (each for each in PROJECT["dependencies"] if re.match(r"torch\W", each))
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned
    return {
        "lowest": "torch==" + asked.partition(">=")[2],
        "tested": f"torch=={pinned[1]}",
        "newest": "torch",
    }


def try_out(scripts: Path, empty: Path) -> str:
    """Everything in TRIED, and the completion script, in an empty directory. Raises
    CommandError.
    """
    for what in TRIED.values():
        said = run([str(scripts / what[0]), *what[1:]], empty, HF_HUB_OFFLINE="1")
        if "--version" in what and said.split() != ["ctrans,", "version", ctrans.__version__]:
            raise CommandError(f"{' '.join(what)} says {said!r}")
    if "_ctrans_completion" not in run(
        [str(scripts / "ctrans")], empty, _CTRANS_COMPLETE="zsh_source"
    ):
        raise CommandError("no completion script")
    return (
        f"{', '.join(TRIED)}, completion; a page of"
        f" {(empty / 'simulate.html').stat().st_size / 1e6:.1f} MB"
    )


@dataclasses.dataclass(frozen=True)
class Home:
    """Where one Python's environments are made, each anew, and the wheel tried in them. All methods
    raise CommandError.
    """

    python: str
    wheel: Path
    place: Path

    def empty(self) -> tuple[Path, Path]:
        """The scripts of an environment without packages, and a directory without files."""
        for name in ("environment", "directory"):
            shutil.rmtree(self.place / name, ignore_errors=True)
        run([self.python, "-m", "venv", str(self.place / "environment")])
        (self.place / "directory").mkdir()
        return self.place / "environment" / "bin", self.place / "directory"

    def resolved(self, extras: str, torch: str) -> dict[str, str]:
        """The versions that pip would install, by name, from metadata alone."""
        report = self.place / "report.json"
        asked = [f"{self.wheel}[{extras}]", torch]
        run(
            [
                self.python,
                "-m",
                "pip",
                "install",
                "--dry-run",
                "--ignore-installed",
                "--quiet",
                "--report",
                str(report),
                *asked,
            ]
        )
        installs = json.loads(report.read_text())["install"]
        return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in installs}

    def without_torch(self) -> tuple[bool, str]:
        """What needs no torch: all sources are this Python's, and the command says its version and
        its help.
        """
        scripts, directory = self.empty()
        run([str(scripts / "pip"), "install", "--quiet", "--no-deps", str(self.wheel), "click"])
        (site,) = (scripts.parent / "lib").glob("python*/site-packages")
        packages = [str(site / name) for name in ("ctrans", "solvers")]
        run([str(scripts / "python"), "-W", "error", "-m", "compileall", "-q", "-f", *packages])
        for option in ("--version", "--help"):
            run([str(scripts / "ctrans"), option], directory)
        return True, "compiles without a warning, --version and --help"

    def extras(self) -> tuple[bool, str]:
        """All extras at once have versions that go together."""
        versions = self.resolved(",".join(PROJECT["optional-dependencies"]), torches()["tested"])
        return (
            True,
            (
                f"all {len(PROJECT['optional-dependencies'])} at once resolve, to {len(versions)}"
                " packages"
            ),
        )

    def locked(self) -> tuple[bool, str]:
        """Everything in the lock is installed, by its hash."""
        scripts, _ = self.empty()
        run(
            [
                str(scripts / "pip"),
                "install",
                "--quiet",
                "--no-deps",
                "--require-hashes",
                "--requirement",
                str(LOCK),
            ]
        )
        installed = json.loads(run([str(scripts / "pip"), "list", "--format", "json"]))
        return True, f"{len(installed)} packages, each by its hash"

    def with_torch(self, torch: str, *, cuda: bool) -> tuple[bool | None, str]:
        """Whether it works with that torch; None where that was resolved alone."""
        versions = self.resolved("report", torch)
        what = f"torch {versions['torch']}, {len(versions)} packages"
        if any(name.startswith("nvidia-") for name in versions) and not cuda:
            return (
                None,
                (
                    f"{what} resolve; the index has but its CUDA build, which is not installed"
                    " without --cuda"
                ),
            )
        scripts, directory = self.empty()
        run([str(scripts / "pip"), "install", "--quiet", f"{self.wheel}[report]", torch])
        run([str(scripts / "pip"), "check"])
        return True, f"{what}: {try_out(scripts, directory)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cuda", action="store_true", help="install CUDA builds of torch too, gigabytes each"
    )
    parser.add_argument(
        "--python", action="append", default=[], help="an interpreter to try; repeatable"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try one Python, with the torch of constraints.txt alone",
    )
    parser.add_argument(
        "--sign", type=Path, help="an SSH key that signs the sums; its .pub lies beside it"
    )
    options = parser.parse_args()
    lines: list[str] = []
    bad = 0

    def tell(what: str, seen: str, *, holds: bool | None) -> None:
        nonlocal bad
        bad += holds is False
        word = {True: "holds", False: "DOES NOT HOLD", None: "not tried"}[holds]
        lines.append(f"{word:>13}  {what}{f': {seen}' if seen else ''}")
        print(lines[-1], flush=True)

    def timed(what: str, trial: Callable[[], Seen]) -> None:
        started = time.monotonic()
        try:
            holds, seen = trial()
        except CommandError as error:
            holds, seen = False, str(error)
        tell(what, f"{seen} ({time.monotonic() - started:.0f} s)", holds=holds)

    for what, holds, seen in state():
        tell(what, seen, holds=holds)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        sdist, wheel = built(place)
        for what, holds, seen in contents(sdist, wheel, place):
            tell(what, seen, holds=holds)
        tools, dist = place / "tools/bin", place / "dist"
        timed("pip-audit", lambda: audited(tools / "pip-audit", place))
        bill = dist / f"ctrans-{ctrans.__version__}.cdx.json"
        available = interpreters(options.python)
        quick = (
            next((version for version, python in available.items() if python), None)
            if options.quick
            else None
        )
        for version, python in available.items():
            if python is None or (options.quick and version != quick):
                tell(f"Python {version}", "--quick" if python else "there is none here", holds=None)
                continue
            home = Home(python, wheel, place)
            trials: dict[str, Callable[[], Seen]] = {
                "without torch": home.without_torch,
                "extras": home.extras,
                "lock": home.locked,
            }
            for which, torch in torches().items():
                if which == "tested" or not options.quick:
                    trials[f"{which} torch"] = functools.partial(
                        home.with_torch, torch, cuda=options.cuda
                    )
            for what, trial in trials.items():
                timed(f"Python {version}, {what}", trial)
                if (
                    what == "tested torch"
                    and not bill.exists()
                    and (home.place / "environment/bin/ctrans").exists()
                ):
                    timed(
                        "SBOM",
                        lambda: bill_of_materials(
                            tools / "cyclonedx-py", place / "environment/bin/python", bill
                        ),
                    )
        if not bill.exists():
            tell("SBOM", "no environment with the wheel and the tested torch was made", holds=None)
        (dist / SUMS).write_text(sums(dist))
        checked = run(["sha256sum", "--check", "--strict", SUMS], dist)
        tell("sums", f"{len(checked.splitlines())} files, checked by sha256sum", holds=True)
        timed("signature", lambda: signed(dist, options.sign and options.sign.resolve()))
        left = ROOT / "out/release" / ctrans.__version__
        shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(dist, left)
        tell(
            "left in out/release",
            ", ".join(sorted(path.name for path in left.iterdir())),
            holds=True,
        )
    keep(
        "release-quick" if options.quick else "release",
        [*lines, "", f"{bad} do not hold" if bad else "all that was tried holds"],
    )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
