"""Two processes share each map (tensor parallelism), with it the tokens between maps (sequence
parallelism), or the blocks.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.training.monitor import Monitor
from ctrans.training.monitor.loop_reader import ANOTHER_LOSS, THE_TARGETS
from tests.training.monitor.test_bits import ran

BLOCKS, HEADS, WIDTH, VOCABULARY = 3, 4, 32, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        return self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.attention, self.n2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList(Block() for _ in range(BLOCKS)),
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def share(model, way):
    """As torch's own tutorial of tensor parallelism does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh, by_tokens = init_device_mesh("cpu", (2,)), way == "sequence"
    out = RowwiseParallel(output_layouts=Shard(1) if by_tokens else Replicate())
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.o": out, "mlp.0": ColwiseParallel(), "mlp.2": out}
    if by_tokens:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {
            "n1": SequenceParallel(),
            "n2": SequenceParallel(),
            "attention": whole,
            "mlp": whole,
        }
        ends = {
            "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
        }
        ends["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


class Stage(nn.Module):
    """Two blocks of the model with the table of tokens, or the third with the head."""

    def __init__(self, model, rank):
        super().__init__()
        self.table, self.layers = (
            (None, model.layers[2:]) if rank else (model.table, model.layers[:2])
        )
        self.norm, self.head = (model.norm, model.head) if rank else (None, None)

    def forward(self, x):
        x = x if self.table is None else self.table(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipelined(stage, rank):
    """A step of two micro-batches through both stages."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu")), n_microbatches=2, loss_fn=cross_entropy
    )

    def step(inputs, targets):
        losses = []
        schedule.step(*([] if rank else [inputs]), target=targets, losses=losses)
        return sum(losses) / 2 if losses else None

    return step


def trained(way=None):
    """The figures of the last of six steps."""
    torch.manual_seed(0)
    model, rank = Model(), 0 if way is None else torch.distributed.get_rank()
    if way == "pipeline":
        model = Stage(model, rank)
    monitor = Monitor(
        model, every=2, example=torch.randn(2, 12, WIDTH) if way == "pipeline" and rank else None
    )
    if way in ("tensor", "sequence"):
        share(model, way)
    forward = (
        pipelined(model, rank)
        if way == "pipeline"
        else lambda x, targets: cross_entropy(model(x), targets)
    )
    optimiser, generator = (
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        torch.Generator().manual_seed(1),
    )
    for _ in range(6):
        tokens = torch.randint(VOCABULARY, (2, 13), generator=generator)
        loss = forward(tokens[:, :-1], tokens[:, 1:])
        if way != "pipeline":
            loss.backward()
        monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()
    monitor.close()
    # the first stage returns a state, and no logits
    missing = {THE_TARGETS: ANOTHER_LOSS} if way == "pipeline" and not rank else {}
    assert monitor.gauges.missing == missing
    step, figures = monitor.past.reports[-1]
    assert step == 6
    return figures


OF_SAMPLES = (
    "update",
    "update_outside",
    "unmoved",
    "adam_gradient_ratio",
    "adam_gradient_ratio_outside",
)
BY_HEAD = ("logit", "ahead", "entropy")


def by_two(way, tmp_path):
    """The figures of both processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = ran(launch, Path(__file__), tmp_path / way)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [json.loads((tmp_path / f"{way}-{rank}.json").read_text()) for rank in (0, 1)]
    return parts


@pytest.mark.slow
def test_a_stage_of_a_pipeline_is_watched_as_a_model_of_its_own(tmp_path):
    """Of its states it sees the first micro-batch; its gradients are of all."""
    whole, (first, second) = trained(), by_two("pipeline", tmp_path)
    assert (len(first["rms"]), len(second["rms"])) == (5, 3)
    assert first["rms"][-1] == pytest.approx(second["rms"][0])
    for name in ("gradient", "update", "decay_share"):
        assert first[name] + second[name] == pytest.approx(whole[name], rel=1e-3), name
    assert second["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert "loss" not in first


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor", "sequence"])
def test_two_processes_see_what_one_sees(way, tmp_path):
    whole, parts = trained(), by_two(way, tmp_path)
    assert all(part.keys() == whole.keys() for part in parts)
    for name in BY_HEAD:  # each process has two of the four heads
        own = [x for k in range(BLOCKS) for part in parts for x in part[name][2 * k : 2 * k + 2]]
        assert own == pytest.approx(whole[name], rel=1e-4, nan_ok=True), name
    for name in OF_SAMPLES:
        for part in parts:
            assert part[name] == pytest.approx(whole[name], rel=0.15, nan_ok=True), name
    same = set(whole) - {*OF_SAMPLES, *BY_HEAD, "seconds"}
    if way == "sequence":  # each process has half of the tokens
        for name, halves in (("costate", 1), ("rms", 2), ("velocity", 2)):
            both = [
                math.sqrt((x**2 + y**2) / halves)
                for x, y in zip(parts[0][name], parts[1][name], strict=True)
            ]
            assert both == pytest.approx(whole[name], rel=1e-4, nan_ok=True), name
        same = {
            "loss",
            "gradient",
            "gradient_norm",
            "gradient_outside",
            "log_z",
            "largest_logit",
            "rate_share",
            "decay_share",
        }
    for name in same:
        for part in parts:
            assert part[name] == pytest.approx(whole[name], rel=1e-3, nan_ok=True), name


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    out = Path(sys.argv[1])
    found = trained(out.name)
    out.with_name(f"{out.name}-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
