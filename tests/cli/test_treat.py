"""`ctrans diagnose --treat`: the copy, how it is undone, what is refused, and what a disk that
fails leaves.
"""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.examine.diagnosis.treated_copy import ACTS, BEFORE, treat
from ctrans.examine.diagnosis.treatment import PROVED, TREATED
from ctrans.interop import to_nanogpt
from ctrans.measure.findings import Reading
from ctrans.model.checkpoint import load, save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.sums import STATE, SUMS, sums
from solvers import ConfigError
from tests.campaigns.disk import BrokenDisk, raising
from tests.cli.test_commands import run, strict
from tests.helpers import learned
from tests.interop.models import TEXT

WEIGHT, LARGE = "model.layers.1.mlp.down_proj.weight", 50.0
FEW = ("--context", "8", "--batch", "1", "--json", "-")
KINDS = {"one file": "10GB", "shards": "30KB", "bfloat16": "10GB"}
"""Largest size of a file of weights."""
UNDO = Path(__file__).parents[2] / "docs" / "commands" / "diagnose.md"


def llama(large=1.0, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**TEXT, "vocab_size": 256, "num_hidden_layers": 4})
    model = learned(transformers.LlamaForCausalLM(config))
    with torch.no_grad():
        model.get_parameter(WEIGHT).mul_(large)
    return model.to(dtype).eval()


def tensors(directory):
    return {
        name: each
        for path in directory.glob("*.safetensors")
        for name, each in load_file(path).items()
    }


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def logits(directory):
    with torch.no_grad():
        model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
        return model(torch.arange(12).unsqueeze(0)).logits


@pytest.fixture(scope="module", params=KINDS)
def treated(request, tmp_path_factory):
    """The directory of an ill model and its treated copy, and what the command said."""
    place, dtype = (
        tmp_path_factory.mktemp("treat"),
        (torch.bfloat16 if request.param == "bfloat16" else torch.float32),
    )
    llama(dtype=dtype).save_pretrained(place / "healthy", max_shard_size=KINDS[request.param])
    llama(LARGE, dtype).save_pretrained(place / "ill", max_shard_size=KINDS[request.param])
    before = contents(place / "ill")
    result = run("diagnose", place / "ill", "--treat", place / "models" / "treated", *FEW)
    assert result.exit_code == 0, result.output
    assert contents(place / "ill") == before, "the model itself stays as it is"
    return place, strict(result.stdout)["treatment"]


@pytest.mark.cases(1)
def test_the_copy_has_one_other_weight_and_all_others_bit_for_bit(treated):
    place, lines = treated
    ill, made = tensors(place / "ill"), tensors(place / "models" / "treated")
    assert ill.keys() == made.keys()
    assert [name for name in ill if not torch.equal(ill[name], made[name])] == [WEIGHT]
    assert {each.dtype for each in made.values()} == {ill[WEIGHT].dtype}
    size = made[WEIGHT].double().square().mean().sqrt()
    beside = [
        ill[WEIGHT.replace(".1.", f".{k}.")].double().square().mean().sqrt() for k in (0, 2, 3)
    ]
    assert float(size) == pytest.approx(float(torch.stack(beside).median()), rel=1e-3)
    factor = float(size / ill[WEIGHT].double().square().mean().sqrt())
    assert lines == [
        f"in {place / 'models' / 'treated'}, {WEIGHT} is multiplied by {factor:.3g}, to the size in"
        " other blocks",
        # its weights are random, as its gains are
        "no treatment is proven for targets are not predicted",
    ]


def test_the_copy_has_all_files_of_the_model_the_acts_and_the_weights_of_before(treated):
    place, (line, _) = treated
    ill, made = contents(place / "ill"), contents(place / "models" / "treated")
    assert made.keys() == {*ill, BEFORE, ACTS}
    changed = {name for name in ill if ill[name] != made[name]}
    assert len(changed) == 1
    assert changed <= {path.name for path in (place / "ill").glob("*.safetensors")}
    (act,) = json.loads(made[ACTS])
    assert (act["weight"], act["finding"], act["proved"]) == (WEIGHT, TREATED, PROVED)
    assert line.endswith(act["words"])
    assert act["factor"] == pytest.approx(1 / LARGE, rel=0.1)
    assert [path.name for path in (place / "models").iterdir()] == ["treated"]


@pytest.mark.cases(1)
def test_the_treated_model_computes_nearly_what_the_healthy_one_does(treated):
    place, _ = treated
    healthy, ill, made = (logits(place / name) for name in ("healthy", "ill", "models/treated"))
    assert (made - healthy).norm() < 0.02 * healthy.norm()
    assert (ill - healthy).norm() > 0.3 * healthy.norm()
    again = run("diagnose", place / "models" / "treated", *FEW)
    assert TREATED not in [
        each["check"] for each in strict(again.stdout)["placements"]["treated"]["findings"]
    ]


def test_what_the_page_says_undoes_it_bit_for_bit(treated, tmp_path, monkeypatch):
    place, _ = treated
    shutil.copytree(place / "models", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```\n(from pathlib.*?before-treatment.*?)```", UNDO.read_text(), re.S)
    exec(code, {})
    ill, undone = tensors(place / "ill"), tensors(tmp_path / "models" / "treated")
    assert ill.keys() == undone.keys()
    assert all(torch.equal(ill[name], undone[name]) for name in ill)
    assert torch.equal(logits(place / "ill"), logits(tmp_path / "models" / "treated"))


def our_model(large=LARGE):
    model = GPT(
        GPTConfig(depth=3, width=16, heads=2, context=8, placement="pre", initialisation="xavier")
    )
    with torch.no_grad():
        model.depth.sublayers[3].field.down.weight.mul_(large)
    return model


def test_a_model_of_ctrans_keeps_its_checks_and_nothing_of_a_training(tmp_path):
    save(our_model(), tmp_path / "ill")
    of_a_training = (STATE, "optimiser.safetensors", "optimizer.pt")
    of_users = ("notes.txt", "optimum_config.json")
    for name in (*of_a_training, *of_users):
        (tmp_path / "ill" / name).write_text("{}")
    (tmp_path / "ill" / SUMS).write_bytes(sums(tmp_path / "ill"))
    findings = [CHECKS.finding(TREATED, Reading(30.0, "block 1, FFN (segment 3)", "it moves"))]
    changed, *told = treat(
        tmp_path / "ill", tmp_path / "treated", {"ill": Diagnosis(findings, {}, {})}
    )
    assert "multiplied by" in changed
    assert sorted(line.split(" was not copied: it is of a training")[0] for line in told) == sorted(
        [SUMS, *of_a_training]
    )
    names = {path.name for path in (tmp_path / "treated").iterdir()}
    assert names == {"config.json", "model.safetensors", *of_users, BEFORE, ACTS}
    made, old = load(tmp_path / "treated"), our_model(1.0)
    assert torch.allclose(
        made.depth.sublayers[3].field.down.weight,
        old.depth.sublayers[3].field.down.weight,
        rtol=0.3,
    )
    metadata = []
    for name in ("ill", "treated"):
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            metadata.append(file.metadata())
    ours, theirs = metadata
    assert ours.keys() == theirs.keys() == {"format", "crc32", "config_sha256"}
    assert {key for key in ours if ours[key] != theirs[key]} == {"crc32"}
    (tmp_path / "treated" / "config.json").write_text(
        (tmp_path / "treated" / "config.json").read_text().replace('"dt": 1.0', '"dt": 0.5')
    )
    with pytest.raises(ConfigError, match="was changed after"):
        load(tmp_path / "treated")


@pytest.mark.slow
def test_nothing_is_written_without_the_finding_or_without_such_a_weight(tmp_path):
    """A gain of 100 makes its sublayer as large, and no weight is scaled for it."""
    healthy = our_model(1.0)
    save(healthy, tmp_path / "healthy")
    with torch.no_grad():
        healthy.depth.sublayers[3].input_norm.weight.mul_(100.0)
    save(healthy, tmp_path / "gains")
    nothing = (
        f"nothing was changed: that needs {TREATED!r}, and a weight 10 times as large as in other"
        " blocks"
    )
    for name, also in (("healthy", []), ("gains", ["no treatment is proven for "])):
        before = contents(tmp_path)
        result = strict(
            run("diagnose", tmp_path / name, "--treat", tmp_path / "treated", *FEW).stdout
        )
        (found,) = result["placements"].values()
        checks = [each["check"] for each in found["findings"]]
        assert (TREATED in checks) is (name == "gains"), checks
        assert result["treatment"][0] == nothing
        others = ", ".join(each for each in checks if each != TREATED)
        assert result["treatment"][1:] == [f"{words}{others}" for words in also if others]
        assert contents(tmp_path) == before
    assert strict(run("diagnose", tmp_path / "healthy", *FEW).stdout)["treatment"] == []


@pytest.mark.slow
def test_the_line_is_printed(tmp_path):
    save(our_model(), tmp_path / "ill")
    result = run(
        "diagnose",
        tmp_path / "ill",
        "--treat",
        tmp_path / "treated",
        "--batch",
        1,
        "--out",
        tmp_path / "out",
    )
    words = " ".join(result.stdout.split())
    assert "depth.sublayers.3.field.down.weight is multiplied by 0.0" in words
    assert strict((tmp_path / "out" / "diagnose.json").read_text())["treatment"][0].startswith(
        f"in {tmp_path / 'treated'}, "
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["ill", "--treat", "there"],
            "--treat 'there' exists, or is in the model's directory: choose a new directory",
        ),
        (["ill", "--treat", "link"], "--treat 'link' exists"),
        (
            ["ill", "--treat", "ill/treated"],
            "--treat 'ill/treated' exists, or is in the model's directory",
        ),
        (
            ["ill", "ill2", "--treat", "new"],
            (
                "--treat copies one directory with safetensors, and you named --checkpoint,"
                " --checkpoint: give"
            ),
        ),
        (
            ["--treat", "new"],
            "--treat copies one directory with safetensors, and you named none: give it as MODEL",
        ),
        (["pickles", "--treat", "new"], "has no model.safetensors: save the model in that format"),
        (
            ["pickles", "--allow-pickle", "--treat", "new"],
            "has no model.safetensors: save the model in that format",
        ),
        (
            ["nanogpt/ckpt.pt", "--treat", "new"],
            "ckpt.pt' has no model.safetensors: save the model in that format",
        ),
        (
            ["ill/model.safetensors", "--treat", "new"],
            "has no model.safetensors: save the model in that format",
        ),
        (["lost", "--treat", "new"], "has no model-2.safetensors: save the model in that format"),
        (
            ["--python", "module.py:build", "--treat", "new"],
            "and you named --python: give it as MODEL",
        ),
        (
            ["--architecture", "ill", "--treat", "new"],
            "and you named --architecture: give it as MODEL",
        ),
        (["ill", "--weights-only", "--treat", "new"], " has no effect with --weights-only"),
        (["ill", "--treat", "file/new"], "cannot write to directory 'file'"),
    ],
)
def test_what_cannot_be_treated_is_one_line_before_the_diagnosis_and_nothing_is_written(
    args, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "ctrans.cli.diagnose.diagnose", lambda *args, **kwargs: pytest.fail("it was diagnosed")
    )
    for name in ("ill", "ill2"):
        save(our_model(), tmp_path / name)
    for name in ("there", "pickles", "nanogpt", "lost"):
        (tmp_path / name).mkdir()
    for name in ("pickles", "lost"):
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"")
    index = {"metadata": {}, "weight_map": {"a": "model-2.safetensors"}}
    (tmp_path / "lost" / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(to_nanogpt(our_model()), tmp_path / "nanogpt" / "ckpt.pt")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    before, names = contents(tmp_path), sorted(tmp_path.rglob("*"))
    result = run("diagnose", *args, *FEW)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert words in result.stderr, result.stderr
    assert contents(tmp_path) == before
    assert sorted(tmp_path.rglob("*")) == names


class Killed(BaseException):
    """The process ends here."""


def dying(path):
    raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(
    "fail",
    [raising(errno.ENOSPC), raising(errno.EIO), dying],
    ids=["full disk", "broken disk", "killed"],
)
def test_a_failure_or_a_kill_at_any_operation_leaves_no_copy_or_a_whole_one(
    fail, lasting, tmp_path
):
    llama(LARGE).save_pretrained(tmp_path / "ill", max_shard_size="60KB")
    results = {
        "ill": Diagnosis([CHECKS.finding(TREATED, Reading(30.0, "block 1", "it moves"))], {}, {})
    }
    (tmp_path / "0").mkdir()
    with BrokenDisk(tmp_path / "0") as disk:
        treat(tmp_path / "ill", tmp_path / "0" / "treated", results)
    whole, before, seen = contents(tmp_path / "0" / "treated"), contents(tmp_path / "ill"), set()
    said = set()
    assert disk.count > 50
    for number in range(1, disk.count + 1):
        out = tmp_path / str(number) / "treated"
        out.parent.mkdir()
        try:
            with BrokenDisk(out.parent, number, fail, lasting=lasting):
                treat(tmp_path / "ill", out, results)
        except (ConfigError, Killed) as error:
            said.add(str(error).partition(":")[0].replace(repr(str(out)), "OUT"))
        seen.add(out.exists())
        assert not out.exists() or contents(out) == whole
        if not lasting and not out.exists():
            assert list(out.parent.iterdir()) == [], "it cleans up"
    assert contents(tmp_path / "ill") == before
    assert False in seen
    assert said == ({""} if fail is dying else {"cannot write OUT"})


def test_a_copy_holds_what_belongs_to_the_model_and_names_the_rest(tmp_path):
    source = tmp_path / "ill"
    llama(LARGE).save_pretrained(source)
    private = tmp_path / "private.txt"
    private.write_text("a secret")
    (source / "README.md").write_text("about the model")
    (source / ACTS).write_text("of an earlier treatment")
    (source / "notes.txt").symlink_to(private)
    (source / "loop").symlink_to(".")
    (source / "more").symlink_to(".")
    (source / "zero").symlink_to("/dev/zero")
    (source / "lost").symlink_to("nowhere")
    (source / "folder").mkdir()
    os.mkfifo(source / "pipe")
    with (source / "huge.bin").open("wb") as file:
        file.truncate(20 << 30)
    out = tmp_path / "treated"
    done = run("diagnose", "--model", source, "--treat", out, *FEW)
    assert not done.stderr.startswith("ctrans: "), done.stderr
    found = strict(done.stdout)
    assert {path.name for path in out.iterdir()} == {
        ACTS,
        BEFORE,
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
    }
    assert (source / ACTS).read_text() == "of an earlier treatment"
    told = "\n".join(found["treatment"])
    for name in (ACTS, "notes.txt", "loop", "more", "zero", "lost", "folder", "pipe", "huge.bin"):
        assert f"{name} was not copied" in told


def test_files_that_a_hub_links_to_are_copied(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    llama(LARGE).save_pretrained(snapshot)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    out = tmp_path / "treated"
    run("diagnose", "--model", snapshot, "--treat", out, *FEW)
    assert not any(path.is_symlink() for path in out.iterdir())
    assert (out / "config.json").read_bytes() == (blobs / "config.json").read_bytes()
