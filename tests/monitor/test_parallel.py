"""Two processes that talk through gloo: replicated and sharded trainings have the bits that they have without a monitor."""

import pytest

from ctrans.monitor import read_log
from tests.monitor.test_bits import ran

WORKER = """
import contextlib, sys, torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from ctrans.monitor import Monitor
from tests.monitor.test_bits import OnTokens, gpt, hugging_face

torch.distributed.init_process_group("gloo")
rank, out = torch.distributed.get_rank(), sys.argv[1]


def trained(make, way, monitored, name, steps=20, spoiled=False, **options):
    torch.manual_seed(0)
    model = make()
    watched = model.model if isinstance(model, OnTokens) else model
    monitor = Monitor(watched, every=5, out=f"{out}/{name}", **options) if monitored else None
    if way == "ddp":
        called = DistributedDataParallel(model)
    else:
        for part in model.modules():
            if type(part).__name__ in ("Attention", "MLP", "GPT2Block"):
                fully_shard(part)
        called = fully_shard(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        tokens = torch.randint(32, (2, 9), generator=generator)
        loss = called(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        if monitor is not None:  # a loss that one process alone finds too large
            monitor.step(loss * (1000.0 if spoiled and rank == 1 and step == 14 else 1.0), optimiser)
        optimiser.step()
        optimiser.zero_grad()
    if monitor is not None:
        monitor.close()
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in model.state_dict().items()}
    return whole, monitor


def hugging():
    model = OnTokens(hugging_face())
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return model


for name, make in (("own", gpt), ("hugging face", hugging)):
    for way in ("ddp", "fsdp"):
        without, _ = trained(make, way, False, name)
        weights, monitor = trained(make, way, True, f"{way} {name}")
        assert all(torch.equal(weights[key], without[key]) for key in without), (name, way)
        assert monitor.gauges.unknown == {}, monitor.gauges.unknown
lowered, monitor = trained(gpt, "ddp", True, "lowered", spoiled=True, react=["lower"], limits={"loss spike": {"least": 3}})
assert monitor.reactions.factor == 0.5, monitor.reactions.factor
both = [torch.zeros_like(lowered["token_embedding.weight"]) for _ in range(2)]
torch.distributed.all_gather(both, lowered["token_embedding.weight"])
assert torch.equal(*both)
print("the same", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_replicated_and_sharded_trainings_are_as_without_and_react_alike(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    out = tmp_path / "run"
    done = ran(["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29644"], script, out)
    assert done.stdout.count("the same") == 2, done.stderr[-3000:]
    for name in ("own", "hugging face"):
        replicated, sharded = (read_log(out / f"{way} {name}").reports[-1].figures for way in ("ddp", "fsdp"))
        for gauge in ("rms", "velocity", "costate", "gradient", "logit", "entropy", "gradient_norm", "loss"):
            assert sharded[gauge] == pytest.approx(replicated[gauge], rel=0.02, nan_ok=True), (name, gauge)
        assert "update" in sharded
