"""Two processes share each map (tensor parallelism), and with it the tokens between maps (sequence parallelism)."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.monitor import Monitor
from tests.monitor.test_bits import ran

BLOCKS, HEADS, WIDTH, VOCABULARY = 3, 4, 32, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.attention, self.n2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
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
        plan |= {"n1": SequenceParallel(), "n2": SequenceParallel(), "attention": whole, "mlp": whole}
        ends = {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel()}
        ends["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def trained(way=None):
    """The figures of the last of six steps, and the loss."""
    torch.manual_seed(0)
    model = Model()
    monitor = Monitor(model, every=2)
    if way is not None:
        share(model, way)
    optimiser, generator = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.Generator().manual_seed(1)
    for _ in range(6):
        tokens = torch.randint(VOCABULARY, (2, 13), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()
    monitor.close()
    assert not monitor.gauges.unknown, monitor.gauges.unknown
    step, figures = monitor.past.reports[-1]
    assert step == 6
    return figures


OF_SAMPLES = ("update", "update_outside", "unmoved", "adam_gradient_ratio", "adam_gradient_ratio_outside")
BY_HEAD = ("logit", "ahead", "entropy")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor", "sequence"])
def test_two_processes_see_what_one_sees(way, tmp_path):
    whole = trained()
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29648"]
    done = ran(launch, Path(__file__), tmp_path / way)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [json.loads((tmp_path / f"{way}-{rank}.json").read_text()) for rank in (0, 1)]
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
            both = [math.sqrt((x**2 + y**2) / halves) for x, y in zip(parts[0][name], parts[1][name], strict=True)]
            assert both == pytest.approx(whole[name], rel=1e-4, nan_ok=True), name
        same = {"loss", "gradient", "gradient_norm", "gradient_outside", "log_z", "largest_logit", "rate_share", "decay_share"}
    for name in same:
        for part in parts:
            assert part[name] == pytest.approx(whole[name], rel=1e-3, nan_ok=True), name


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    out = Path(sys.argv[1])
    found = trained(out.name)
    out.with_name(f"{out.name}-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
