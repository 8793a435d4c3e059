"""Two processes that talk through gloo: replicated and sharded trainings have the bits that they
have without a monitor.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctrans.training.monitor import read_log
from tests.training.monitor.test_bits import ran

WORKER = """
import contextlib, sys, torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from ctrans.training.monitor import Monitor
from tests.training.monitor.test_bits import OnTokens, gpt, hugging_face

torch.distributed.init_process_group("gloo")
rank, out = torch.distributed.get_rank(), sys.argv[1]


def trained(make, way, monitored, name, steps=20, spoiled=False, broken=False, **options):
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
        (loss * (float("nan") if broken and rank == 1 and step == 14 else 1.0)).backward()
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
        assert monitor.gauges.missing == {}, monitor.gauges.missing
_, monitor = trained(gpt, "ddp", True, "spoiled", spoiled=True, react=["stop"], limits={"loss spike": {"least": 3}})
assert monitor.stopped, rank
for way in ("ddp", "fsdp"):
    weights, monitor = trained(gpt, way, True, f"broken {way}", broken=True, react=["skip"])
    assert monitor.reactions.skipped == [15], monitor.reactions.skipped
    assert all(torch.isfinite(each).all() for each in weights.values())
print("the same", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_replicated_and_sharded_trainings_are_as_without_and_react_alike(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    out = tmp_path / "run"
    done = ran(
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29644"],
        script,
        out,
    )
    assert done.stdout.count("the same") == 2, done.stderr[-3000:]
    for name in ("own", "hugging face"):
        replicated, sharded = (
            read_log(out / f"{way} {name}").reports[-1].figures for way in ("ddp", "fsdp")
        )
        for gauge in (
            "rms",
            "velocity",
            "costate",
            "gradient",
            "logit",
            "entropy",
            "gradient_norm",
            "loss",
        ):
            assert sharded[gauge] == pytest.approx(replicated[gauge], rel=0.02, nan_ok=True), (
                name,
                gauge,
            )
        assert "update" in sharded


LOST = """
import os, sys, torch
from torch.nn.parallel import DistributedDataParallel
from ctrans.training.monitor import Monitor
from tests.training.monitor.test_bits import gpt

rank, way = int(os.environ["RANK"]), sys.argv[1]
torch.distributed.init_process_group("gloo")
model = gpt()
called = DistributedDataParallel(model)
monitor = Monitor(model, every=2, react=["stop", "save"], save=lambda alarm: None, limits={"updates too large": {"limit": 0.0}})
if rank == 1 and way == "no report":
    monitor._probe = lambda *of: 1 / 0
if rank == 1 and way == "no save":
    monitor.reactions.save = lambda alarm: 1 / 0
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(rank))
for step in range(1, 9):
    called(tokens[:, :-1], tokens[:, 1:])[1].backward()
    if way == "dies" and rank == 1 and step == 4:
        os._exit(7)
    monitor.step(1.0, optimiser)
    optimiser.step()
    optimiser.zero_grad()
print("stopped", monitor.stopped, float(sum(weight.sum() for weight in model.parameters())))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "port"), [("no report", 29645), ("no save", 29646), ("dies", 29647)]
)
def test_no_process_waits_for_one_that_fails_to_report_or_that_dies(way, port, tmp_path):
    (tmp_path / "worker.py").write_text(LOST)
    about = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    about["PYTHONPATH"] = str(Path(__file__).parents[3])
    both = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "worker.py"), way],
            env={**about, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        ends = [process.communicate(timeout=300) for process in both]
    finally:
        for process in both:
            process.kill()
    codes = [process.returncode for process in both]
    if way == "dies":
        assert codes[1] == 7
        assert codes[0] == 1, "its own collective fails, and it waits for nobody"
    else:
        assert codes == [0, 0], ends
        assert ends[0][0] == ends[1][0], ends
        assert ends[0][0].split()[1] == "True"
