"""Names of modules of version 0.3 work for one more version."""

import importlib
import sys
import warnings

import pytest

from ctrans.base.old_names import MOVED, OldNames, name_of_today

DEEP = (
    "ctrans.fields.attention",
    "ctrans.stability.diagnosis.diagnose",
    "ctrans.stability.forward.bounds",
    "ctrans.walk.passes",
)


@pytest.mark.parametrize("old", [*MOVED, *DEEP])
def test_an_old_name_gives_the_module_of_today_with_a_warning(old, monkeypatch):
    monkeypatch.setattr(
        sys, "meta_path", [OldNames(), *sys.meta_path]
    )  # the tests' type checker has a hook of its own in front
    new = importlib.import_module(name_of_today(old))
    spec = new.__spec__
    for name in [name for name in sys.modules if name == old or name.startswith(f"{old}.")]:
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        assert importlib.import_module(old) is new
    assert new.__spec__ is spec
    assert new.__name__ == name_of_today(old)
    assert any(f"{old} is now {new.__name__}" in str(each.message) for each in raised)


def test_from_ctrans_import_gives_an_old_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ctrans import placement
    assert placement is importlib.import_module("ctrans.dynamics.placement")


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"ctrans\.nothing"):
        importlib.import_module("ctrans.nothing")
