"""What `make release-check` says of the supply chain, and requirements.lock."""

import json
import re
import shutil
import subprocess
import tomllib

import pytest

from benchmarks import release
from benchmarks.lock import LEFT_OUT, LOCK, NAME

ROOT = release.ROOT
PINNED = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))


def test_the_lock_has_the_versions_of_the_constraints():
    locked = NAME.findall(LOCK.read_text())
    assert {name: version for name, version in locked if name in PINNED} == {
        name: version for name, version in PINNED.items() if name != "torch"
    }


def test_the_lock_has_what_the_project_asks_for_and_no_torch():
    locked = {name for name, _ in NAME.findall(LOCK.read_text())}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        each
        for group in (project["dependencies"], *project["optional-dependencies"].values())
        for each in group
    ]
    names = {re.split(r"[^\w-]", each)[0].lower() for each in asked} - {"ctrans", "torch"}
    assert names <= locked
    assert not [name for name in locked if LEFT_OUT.match(name)]


def test_each_package_of_the_lock_has_hashes_and_none_has_an_address():
    text = LOCK.read_text()
    assert "://" not in text
    assert "--index" not in text
    requirements = re.split(r"\n(?=\S)", text[text.index("\naccelerate==") + 1 :].rstrip())
    assert len(requirements) == len(NAME.findall(text)) > 100
    for each in requirements:
        first, *hashes = each.split(" \\\n")
        assert NAME.match(first), first
        assert hashes, first
        assert all(re.fullmatch(r" {4}--hash=sha256:[0-9a-f]{64}", line) for line in hashes), first


def fake(tmp_path, name, prints, code=0):
    """A command that prints this, whatever it is asked."""
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return path


KNOWN, UNKNOWN = (
    {"name": "a", "version": "1", "vulns": []},
    {
        "name": "b",
        "skip_reason": "not found",
    },
)
FAULTY = {"name": "c", "version": "1", "vulns": [{"id": "PYSEC-1"}]}


@pytest.mark.parametrize(
    ("dependencies", "code", "holds", "words"),
    [
        ([KNOWN], 0, True, "no known fault; 2 of 2"),
        ([KNOWN, UNKNOWN], 0, None, "could not be tried in full: 2 of 4"),
        ([UNKNOWN], 0, None, "could not be tried in full: 0 of 2"),
        ([KNOWN, UNKNOWN, FAULTY], 1, False, "known faults: c PYSEC-1"),
        (None, 1, None, "could not be tried: pip-audit ended without an answer"),
        (None, 2, None, "could not be tried: pip-audit ended without an answer"),
    ],
)
def test_an_audit_without_an_answer_is_no_audit(dependencies, code, holds, words, tmp_path):
    """pip-audit ends with 0 where it skipped each package. It is asked twice: some packages have
    two versions.
    """
    said = "Traceback" if dependencies is None else json.dumps({"dependencies": dependencies})
    found, seen = release.audited(fake(tmp_path, "pip-audit", said, code), tmp_path)
    assert found is holds
    assert words in seen


def test_the_audit_asks_for_every_package_once_a_time(tmp_path):
    command = tmp_path / "pip-audit"
    command.write_text(
        '#!/bin/sh\ncat audited.txt >> asked.txt\necho >> asked.txt\necho \'{"dependencies":'
        " []}'\n"
    )
    command.chmod(0o755)
    release.audited(command, tmp_path)
    asked = (tmp_path / "asked.txt").read_text().split()
    assert sorted(asked) == sorted(
        f"{name}=={version}"
        for name, version in [*NAME.findall(LOCK.read_text()), ("torch", PINNED["torch"])]
    )


@pytest.mark.parametrize("lost", [None, "scipy"])
def test_a_bill_of_materials_has_what_the_wheel_needs_and_no_path_of_this_machine(lost, tmp_path):
    needed = {re.split(r"[^\w-]", each)[0] for each in release.PROJECT["dependencies"]} - {lost}
    links = [
        {"type": "distribution", "url": url}
        for url in ("file:///here/ctrans.whl", "https://example.org")
    ]
    own = {"name": "ctrans", "version": release.ctrans.__version__, "externalReferences": links}
    components = [own, *({"name": name, "version": "1"} for name in needed)]
    (tmp_path / "made.json").write_text(
        json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "components": components})
    )
    holds, seen = release.bill_of_materials(
        fake(tmp_path, "cyclonedx-py", ""), tmp_path / "python", tmp_path / "made.json"
    )
    assert (holds, "without scipy" in seen) == (lost is None, lost is not None)
    kept = (tmp_path / "made.json").read_text()
    assert "https://example.org" in kept
    assert "file:" not in kept


def test_sums_are_those_of_sha256sum(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"wheel")
    (tmp_path / "b.tar.gz").write_bytes(b"sdist")
    (tmp_path / release.SUMS).write_text(release.sums(tmp_path))
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", release.SUMS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert checked.stdout == "a.whl: OK\nb.tar.gz: OK\n"


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen")
def test_sums_are_signed_and_other_sums_or_keys_do_not_pass(tmp_path):
    place = tmp_path / "dist"
    place.mkdir()
    for name in ("key", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(tmp_path / name)],
            check=True,
        )
    (place / "a.whl").write_bytes(b"wheel")
    (place / release.SUMS).write_text(release.sums(place))
    assert release.signed(place, None) == (None, "no key was given: --sign PATH of an SSH key")
    assert release.signed(place, tmp_path / "key")[0] is True
    (command,) = re.findall(r"^ssh-keygen .*$", (ROOT / "SECURITY.md").read_text(), re.M)

    def verified():
        return (
            subprocess.run(
                ["sh", "-c", command], cwd=place, capture_output=True, check=False
            ).returncode
            == 0
        )

    assert verified(), "as SECURITY.md says"
    (place / "allowed_signers").write_text(f"ctrans {(tmp_path / 'other.pub').read_text()}")
    assert not verified(), "another key"
    assert release.signed(place, tmp_path / "key")[0] is True
    (place / release.SUMS).write_text(release.sums(place).replace("a.whl", "b.whl"))
    assert not verified(), "other sums"
    with pytest.raises(release.CommandError):
        release.signed(place, tmp_path / "no key")
