"""Names of modules and attributes of version 0.3 work for one more version."""

import importlib
import json
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from ctrans.base.from_json import from_json
from ctrans.base.json_values import plain
from ctrans.base.old_names import MOVED, OldNames, name_of_today
from ctrans.control.maximum_principle import MaximumPrinciple
from ctrans.control.model_check import ModelCheck
from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.measure.forward.bounds import ForwardBounds
from ctrans.measure.forward.contributions import ContributionsByDepth
from ctrans.measure.forward.simulation import simulate
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.training.monitor.log_lines import Report
from solvers import ConfigError

SMALL = GPTConfig(vocab_size=5, context=4, depth=1, width=4, heads=1, placement="pre")

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


RESULTS = {
    "a diagnosis": (Diagnosis([], {}, {"heads": "no rows"}), {"unknown": {"heads": "no rows"}}),
    "a check": (
        ModelCheck("pre", 1.0, 4, (), missing={"segment 1 (ffn)": "a dead gain"}),
        {"skipped": {"segment 1 (ffn)": "a dead gain"}},
    ),
    "a maximum principle": (
        MaximumPrinciple("discrete", 1.0, *([[]] * 11), missing={"segment 1 (ffn)": "a dead gain"}),
        {"skipped": {"segment 1 (ffn)": "a dead gain"}},
    ),
    "a simulation": (
        simulate(GPT(SMALL), torch.tensor([[1, 2, 3]])),
        {"unbounded": None, "unreferenced": None},
    ),
    "a simulation without bounds": (
        replace(
            simulate(GPT(SMALL), torch.tensor([[1, 2, 3]])),
            missing={"bound": "no norm", "distance to the ODE": "a dead gain"},
        ),
        {"unbounded": "no norm", "unreferenced": "a dead gain"},
    ),
    "bounds": (ForwardBounds([], [], [], [], []), {"seed_note": ""}),
    "bounds of ours alone": (
        ForwardBounds([], [], [], None, None, {"paper's bound": "no theorem"}),
        {"seed_note": "no theorem"},
    ),
    "contributions": (ContributionsByDepth([], [], [], []), {"note": ""}),
    "a report": (Report(3, {}, {"block 0": "an error"}), {"unknown": {"block 0": "an error"}}),
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_was_missing_has_its_old_names_too_but_not_for_writing(name):
    result, old_names = RESULTS[name]
    for old_name, value in old_names.items():
        with pytest.warns(DeprecationWarning, match=rf"\.{old_name} is now .*\.missing"):
            assert getattr(result, old_name) == value
        with pytest.raises(AttributeError):
            setattr(result, old_name, value)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_version_03_wrote_is_read(name):
    result, old_names = RESULTS[name]
    written = json.loads(json.dumps(plain(result)))
    assert from_json(type(result), written).missing == result.missing
    assert not old_names.keys() & written.keys()
    del written["missing"]
    assert from_json(type(result), {**written, **old_names}).missing == result.missing


def test_a_wrong_reason_is_named():
    with pytest.raises(ConfigError, match=r"Diagnosis\.missing = 'heads'"):
        from_json(Diagnosis, {"findings": [], "readings": {}, "unknown": "heads"})
