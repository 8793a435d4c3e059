"""`ctrans families` as users type it: nothing is said of a family that is not found in it."""

import pytest

from ctrans.interop.families import FAMILIES
from tests.cli.test_commands import run, strict


def test_a_family_is_told_with_its_placement_and_what_is_not_known():
    result = run("families", "gpt_neox", "granite", "albert", "gpt_oss")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "gpt_neox tokens pre at once" in words
    assert "granite tokens pre dt 0.22 yes yes yes yes" in words
    assert "a sink takes up to" in words
    assert "albert: refused." in words


def test_json_has_every_family_asked_for():
    found = strict(run("families", "vit", "t5", "--json", "-").stdout)
    assert list(found["families"]) == ["vit", "t5"]
    assert found["families"]["vit"]["reads"] == "images"
    assert found["options"] == {"names": ["vit", "t5"]}


def test_a_name_that_is_none_gets_a_line():
    result = run("families", "lama")
    assert result.exit_code == 2
    assert "did you mean 'llama'" in result.stderr


@pytest.mark.slow
def test_all_are_told():
    found = strict(run("families", "--json", "-").stdout)["families"]
    assert found.keys() == FAMILIES.keys()
    assert all(each["supported"] == (not FAMILIES[name].refused) for name, each in found.items())
