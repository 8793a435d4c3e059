"""Distributed checkpoints: the numbers that were saved, part by part, and metadata that run nothing."""

import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes

from ctrans.interop import distributed_checkpoint
from ctrans.interop.checkpoint_weights import checkpoint_weights
from ctrans.interop.distributed_checkpoint import distributed_weights
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


def test_weights_are_read_by_name_without_the_optimiser(tmp_path):
    more = {"optimizer": {"state": {"layers.0.mlp.weight": torch.ones(6, 10)}}, "optimizer.exp_avg": torch.ones(3), "step": 7}
    save(numbers() | more, tmp_path)
    check(tmp_path)


def sharded(rank, directory):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29517")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    axes = {"layers.0.mlp.weight": 0, "decoder.layers.mlp.linear_fc1.weight": 1, "decoder.layers.input_layernorm.weight": 0}
    state = numbers()
    for name, axis in axes.items():
        state[name] = torch.distributed.tensor.distribute_tensor(state[name], mesh, [torch.distributed.tensor.Shard(axis)])
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
    monkeypatch.setattr(distributed_checkpoint, "load_pickled", lambda path, part: lengths.append(len(part)) or load(path, part))
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
    "no pickle": (lambda d: (d / ".metadata").write_bytes(b"none"), "is no metadata of a checkpoint"),
    "another object": (lambda d: (d / ".metadata").write_bytes(pickle.dumps([1])), "is no metadata of a checkpoint"),
    "a memo of 4 billion": (
        lambda d: (d / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\xff."),
        "it keeps object 4294967295",
    ),
    "a file elsewhere": (
        lambda d: rewritten(d, lambda m: setattr(info(m), "relative_path", "../x")),
        "must be files in the same directory",
    ),
    "a part beyond the end": (lambda d: rewritten(d, lambda m: setattr(info(m), "length", 1 << 40)), "is not whole"),
    "a part that is too small": (
        lambda d: rewritten(d, lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([1 << 20, 1 << 20]))),
        "does not hold all of w",
    ),
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


def test_a_part_that_holds_another_tensor_is_refused_when_it_is_read(tmp_path):
    save({"w": torch.randn(3, 4)}, tmp_path)
    rewritten(tmp_path, lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.bfloat16))
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
