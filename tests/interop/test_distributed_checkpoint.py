"""Distributed checkpoints: the numbers that were saved, part by part, and metadata that run
nothing.
"""

import argparse
import collections
import copy
import os
import pickle
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes

from ctrans.interop import distributed_checkpoint, inert_pickles
from ctrans.interop.checkpoint_weights import checkpoint_weights
from ctrans.interop.distributed_checkpoint import distributed_weights, gains_less_one
from solvers import ConfigError
from tests.interop.test_pickled import Runs


def numbers():
    """The weights of a model in torch's layout, and the stacked ones of Megatron's."""
    torch.manual_seed(0)
    return {
        "layers.0.mlp.weight": torch.randn(6, 10),
        "layers.1.norm.weight": torch.randn(10).bfloat16(),
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(4, 6, 8),
        "decoder.layers.input_layernorm.weight": torch.randn(4, 6),
    }


def save(state, directory):
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save(state, checkpoint_id=directory)


def check(directory):
    """Every weight as it was saved, and of the stacked ones each block by itself."""
    found, saved = checkpoint_weights(directory), numbers()
    for name in ("layers.0.mlp.weight", "layers.1.norm.weight"):
        assert torch.equal(found.pop(name)(), saved.pop(name))
    for name, whole in saved.items():
        before, after = name.split("layers.")
        for block, part in enumerate(whole):
            assert torch.equal(found.pop(f"{before}layers.{block}.{after}")(), part)
    assert not found


@pytest.mark.slow
def test_weights_are_read_by_name_without_the_optimiser(tmp_path):
    more = {
        "optimizer": {"state": {"layers.0.mlp.weight": torch.ones(6, 10)}},
        "optimizer.exp_avg": torch.ones(3),
        "step": 7,
    }
    save(numbers() | more, tmp_path)
    check(tmp_path)


def sharded(rank, directory):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29517")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    axes = {
        "layers.0.mlp.weight": 0,
        "decoder.layers.mlp.linear_fc1.weight": 1,
        "decoder.layers.input_layernorm.weight": 0,
    }
    state = numbers()
    for name, axis in axes.items():
        state[name] = torch.distributed.tensor.distribute_tensor(
            state[name], mesh, [torch.distributed.tensor.Shard(axis)]
        )
    dcp.save(state, checkpoint_id=directory)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_parts_of_two_processes_are_put_together(tmp_path):
    """Over rows, over the second axis of stacked weights, and over their blocks."""
    processes.spawn(sharded, (str(tmp_path),), nprocs=2)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    check(tmp_path)


def test_only_the_parts_of_a_block_are_read(tmp_path, monkeypatch):
    save({"layers.w": torch.randn(4, 2, 3)}, tmp_path)
    lengths, load = [], distributed_checkpoint.load_pickled
    monkeypatch.setattr(
        distributed_checkpoint,
        "load_pickled",
        lambda path, part: lengths.append(len(part)) or load(path, part),
    )
    found = distributed_weights(tmp_path)
    assert lengths == []
    found["layers.2.w"].make()
    assert len(lengths) == 1


def rewritten(directory, change):
    path = directory / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def info(found):
    return next(iter(found.storage_data.values()))


HOSTILE = {
    "no pickle": (
        lambda d: (d / ".metadata").write_bytes(b"none"),
        "is no metadata of a checkpoint",
    ),
    "another object": (
        lambda d: (d / ".metadata").write_bytes(pickle.dumps([1])),
        "is no metadata of a checkpoint",
    ),
    "a memo of 4 billion": (
        lambda d: (d / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\xff."),
        "it keeps object 4294967295",
    ),
    "a file elsewhere": (
        lambda d: rewritten(d, lambda m: setattr(info(m), "relative_path", "../x")),
        "must be files in the same directory",
    ),
    "a part beyond the end": (
        lambda d: rewritten(d, lambda m: setattr(info(m), "length", 1 << 40)),
        "is not whole",
    ),
    "a part that is too small": (
        lambda d: rewritten(
            d, lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([1 << 20, 1 << 20]))
        ),
        "does not hold all of w",
    ),
    "a negative size": (
        lambda d: rewritten(
            d, lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([-3, -4]))
        ),
        r"gives w the size \(-3, -4\)",
    ),
    "a size that overflows": (
        lambda d: rewritten(
            d, lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([1 << 40, 1 << 40]))
        ),
        "gives w the size",
    ),
    "an axis that overflows": (
        lambda d: rewritten(
            d, lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([2**62, 0]))
        ),
        "a weight has the size",
    ),
    "a weight without a place": (
        lambda d: rewritten(d, lambda m: m.storage_data.clear()),
        "does not say where the part of w at",
    ),
    "a part before the beginning": (
        lambda d: rewritten(d, lambda m: setattr(info(m), "offset", -5)),
        r"the offset -5 and the length \d+: both must be 0 or more",
    ),
    "a path without end": (
        lambda d: rewritten(d, lambda m: setattr(info(m), "relative_path", (1, 2))),
        "relative_path is no text",
    ),
    "no metadata": (lambda d: (d / ".metadata").unlink(), r"lacks \.metadata"),
    "a missing file": (lambda d: next(d.glob("*.distcp")).unlink(), "cannot read"),
    "another backend": (
        lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "the backend 'zarr' of Megatron",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_metadata_are_refused_in_one_line(kind, tmp_path):
    save({"w": torch.randn(3, 4)}, tmp_path)
    damage, words = HOSTILE[kind]
    damage(tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        checkpoint_weights(tmp_path)
    assert "\n" not in str(caught.value)


def nested_key():
    """A pickle of a dictionary whose key is a pair of a pair of ..., each twice: its hash takes
    2**60 steps.
    """
    pairs = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
    return b"\x80\x04}K\x01" + pairs + b"K\x02s."


def test_metadata_are_first_read_within_limits(tmp_path, monkeypatch):
    def limited(act, *, seconds, memory):
        raise ConfigError(f"it needs more than {seconds} seconds")

    (tmp_path / ".metadata").write_bytes(nested_key())
    monkeypatch.setattr(inert_pickles, "run_guarded", limited)
    with pytest.raises(ConfigError, match="it needs more than 15 seconds"):
        checkpoint_weights(tmp_path)


@pytest.mark.slow
def test_metadata_that_take_forever_are_refused(tmp_path, monkeypatch):
    (tmp_path / ".metadata").write_bytes(nested_key())
    monkeypatch.setattr(inert_pickles, "SECONDS", 1)
    with pytest.raises(ConfigError, match="it needs more than its limit"):
        checkpoint_weights(tmp_path)


def test_a_stack_of_blocks_and_the_same_weight_of_a_block_are_refused(tmp_path):
    weights = {"layers.w": torch.ones(2, 3, 3), "layers.0.w": torch.zeros(3, 3)}
    for i, order in enumerate((sorted(weights), sorted(weights, reverse=True))):
        save({name: weights[name] for name in order}, tmp_path / str(i))
        with pytest.raises(ConfigError, match=r"holds layers\.0\.w twice"):
            checkpoint_weights(tmp_path / str(i))


def test_blocks_without_end_are_refused(tmp_path):
    save({"layers.w": torch.randn(0, 4)}, tmp_path)
    rewritten(
        tmp_path,
        lambda m: setattr(m.state_dict_metadata["layers.w"], "size", torch.Size([10**9, 0])),
    )
    with pytest.raises(ConfigError, match="stacks 1,000,000,000 blocks"):
        checkpoint_weights(tmp_path)


@pytest.mark.parametrize("moved", [0, 1])
def test_parts_that_overlap_leave_numbers_unwritten_and_are_refused(moved, tmp_path):
    """Two parts of 2 x 3 in a weight of 4 x 3: at one place, or shifted by a row."""
    save({"w": torch.randn(2, 3)}, tmp_path)

    def double(metadata):
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([4, 3])
        (chunk,) = entry.chunks
        second = copy.deepcopy(chunk)
        second.offsets = torch.Size([moved, 0])
        entry.chunks = [chunk, second]
        (index,) = metadata.storage_data
        again = copy.deepcopy(index)
        object.__setattr__(again, "offset", second.offsets)
        metadata.storage_data[again] = metadata.storage_data[index]

    rewritten(tmp_path, double)
    with pytest.raises(ConfigError, match="two of its parts overlap"):
        checkpoint_weights(tmp_path)


def test_parts_overlap_if_and_only_if_two_have_a_number_in_common():
    generator = random.Random(0)
    outcomes = collections.Counter()
    for _ in range(500):
        size = [generator.randint(1, 5) for _ in range(generator.randint(1, 3))]
        parts = []
        for _ in range(generator.randint(1, 3)):
            starts = tuple(generator.randrange(n) for n in size)
            lengths = tuple(
                generator.randint(0, n - start) for start, n in zip(starts, size, strict=True)
            )
            parts.append((starts, lengths, Path("it"), 0, 0))
        held = torch.zeros(size)
        for starts, lengths, *_ in parts:
            held[tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))] += 1
        overlap = bool((held > 1).any())
        assert distributed_checkpoint._overlap(parts) is overlap, parts
        outcomes[overlap] += 1
    assert min(outcomes.values()) > 50


def test_many_parts_side_by_side_are_compared_along_the_axis_that_divides_them():
    """As tensor parallelism divides columns: each pair in full would be 200 million comparisons."""
    columns = [((0, k), (1000, 1), Path("it"), 0, 0) for k in range(20_000)]
    assert not distributed_checkpoint._overlap(columns)
    assert distributed_checkpoint._overlap([*columns, columns[7]])


def test_a_part_that_holds_another_tensor_is_refused_when_it_is_read(tmp_path):
    save({"w": torch.randn(3, 4)}, tmp_path)
    rewritten(
        tmp_path, lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.bfloat16)
    )
    with pytest.raises(ConfigError, match="does not hold the part of w"):
        checkpoint_weights(tmp_path)["w"]()


def test_code_in_the_metadata_is_not_run(tmp_path):
    save({"w": torch.randn(3, 4)}, tmp_path / "it")
    mark = tmp_path / "ran"
    rewritten(tmp_path / "it", lambda m: setattr(m, "planner_data", Runs(mark)))
    assert checkpoint_weights(tmp_path / "it")["w"]().shape == (3, 4)
    assert not mark.exists()
    pickle.loads((tmp_path / "it" / ".metadata").read_bytes())  # as torch itself reads it
    assert mark.exists()


GAINS = {
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (4, 8),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (4, 8),
    "decoder.final_layernorm.weight": (8,),
}


def megatron(directory, **settings):
    """A checkpoint as Megatron stores it: gains less 1, and the training's arguments among what
    else common.pt has.
    """
    torch.manual_seed(0)
    stored = {name: 0.1 * torch.randn(shape).bfloat16() for name, shape in GAINS.items()}
    more = {
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(4, 6, 8),
        "decoder.final_layernorm.bias": torch.randn(8),
    }
    save(stored | more, directory)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    if settings:
        args = argparse.Namespace(
            params_dtype=torch.bfloat16, hidden_size=8, mean=torch.zeros(3), **settings
        )
        others = {
            "optimizer": collections.OrderedDict(step=[1]),
            "counts": collections.defaultdict(int, a=1),
        }
        torch.save(
            {"args": args, "queue": collections.deque([1, 2]), "iteration": 7, **others},
            directory / "common.pt",
        )
    return stored, more


SAID = {
    "said": {"apply_layernorm_1p": True},
    "not so": {"apply_layernorm_1p": False},
    "old": {"seed": 1},
    "without": {},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [*SAID, "of Bridge", "of NeMo", "of NeMo, not so"])
def test_gains_that_megatron_stored_less_one_become_gains(kind, tmp_path):
    """Oracle: 1 + w of what was stored, where the arguments say so; all else, and other weights, as
    they were stored.
    """
    stored, more = megatron(tmp_path / "weights", **SAID.get(kind, {}))
    for name, which in (
        ("weights/run_config.yaml", "of Bridge"),
        ("context/model.yaml", "of NeMo"),
    ):
        if kind.startswith(which):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(
                f"model:\n  layernorm_zero_centered_gamma: {str(kind == which).lower()}\n  bias:"
                " true\n"
            )
    found = checkpoint_weights(tmp_path / "weights")
    less_one = kind in ("said", "of Bridge", "of NeMo")
    for name, whole in (stored | more).items():
        expected = 1 + whole.float() if less_one and name in stored else whole
        if whole.dim() == 1:
            assert torch.equal(found.pop(name)(), expected)
        for block, part in enumerate(expected) if whole.dim() > 1 else ():
            assert torch.equal(found.pop(name.replace("layers.", f"layers.{block}."))(), part)
    assert not found


NAME = "layernorm_zero_centered_gamma"
YAML = {
    f"model:\n  {NAME}: true # as trained\n": True,
    f"{NAME}: yes\r\nbias: true\r\n": True,
    f"{NAME} : On": True,
    f"'{NAME}': True\n": True,
    f'model:\n  "{NAME}": true\n': True,
    f"model: {{{NAME}: true}}\n": True,
    f'model: {{"bias": false, "{NAME}": true, "a": 1}}\n': True,
    f"- {NAME}: !!bool true\n": True,
    f"model:\n  {NAME}: false # not true\n": False,
    f"# {NAME}: true\n": False,
    f"bias: true # {NAME}: true\n": False,
    f"no_{NAME}: true\n": False,
    f"{NAME}_too: true\n": False,
    f"{NAME}: trueish\n": False,
    f"{NAME}: no\n": False,
    f"{{{NAME}: null, bias: true}}\n": False,
}


@pytest.mark.parametrize("text", YAML)
def test_the_setting_is_found_however_yaml_writes_it(text, tmp_path):
    (tmp_path / "run_config.yaml").write_bytes(text.encode())
    assert gains_less_one(tmp_path) == YAML[text]


def test_code_in_the_arguments_of_megatron_is_not_run(tmp_path):
    megatron(tmp_path / "it", apply_layernorm_1p=True, also=Runs(tmp_path / "ran"))
    assert gains_less_one(tmp_path / "it")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "it" / "common.pt", weights_only=False)  # as Megatron reads it
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("before", [0, 8, 9, 300])
def test_the_setting_is_found_after_any_number_of_names_and_in_later_protocols(
    before, protocol, tmp_path
):
    """A name is remembered by a number of one byte, which may be a line's end, or of four."""
    for said in (True, False):
        args = argparse.Namespace(
            **{f"a{i}": f"b{i}" for i in range(before)}, apply_layernorm_1p=said, after=not said
        )
        torch.save({"args": args}, tmp_path / "common.pt", pickle_protocol=protocol)
        assert gains_less_one(tmp_path) is said


@pytest.mark.parametrize(
    "held", [[1], {"args": 3}, {"names": ["apply_layernorm_1p"], "bf16": True}, {}]
)
def test_other_contents_of_common_say_nothing_of_gains(held, tmp_path):
    torch.save(held, tmp_path / "common.pt")
    assert not gains_less_one(tmp_path)
