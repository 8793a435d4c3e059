"""A monitored training has the bits of one without."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ctrans import GPT, GPTConfig
from ctrans.training.monitor import Monitor
from ctrans.training.objective import Objective
from ctrans.training.settings import TrainConfig

STEPS = 100
ROOT = Path(__file__).parents[3]


def gpt(**options):
    return GPT(GPTConfig(vocab_size=32, context=8, depth=2, width=16, heads=2, **options), seed=1)


class Plain(nn.Module):
    """A module of torch's own layers, with dropout, so that a random number taken would show."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.1, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens, targets=None):
        logits = self.head(self.body(self.embedding(tokens)))
        loss = (
            None
            if targets is None
            else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )
        return logits, loss


def hugging_face(checkpointing=False):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, resid_pdrop=0.1
    )
    model = transformers.GPT2LMHeadModel(config)
    if checkpointing:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"}
        )
    return model


class OnTokens(nn.Module):
    """A model of `transformers` called as the others are."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        return None, self.model(input_ids=tokens, labels=targets, use_cache=False).loss


def spectral():
    """Weights that torch computes at each use, which changes what it keeps of them in training."""
    model = Plain()
    for layer in model.body.layers:
        for linear in (layer.linear1, layer.linear2, layer.self_attn.out_proj):
            parametrizations.spectral_norm(linear)
    return model


CASES = {
    "own": (gpt, {}, {}),
    "post": (lambda: gpt(placement="post"), {}, {}),
    "accumulated": (gpt, {"accumulate": 3}, {}),
    "autocast": (gpt, {"precision": torch.bfloat16}, {}),
    "checkpointed": (
        lambda: Objective(gpt(), TrainConfig(gradient="checkpoint")),
        {},
        {"inner": "model"},
    ),
    "torch's layers": (Plain, {}, {"example": torch.zeros(1, 4, dtype=torch.int64)}),
    "parametrised": (spectral, {}, {"example": torch.zeros(1, 4, dtype=torch.int64)}),
    "hugging face": (lambda: OnTokens(hugging_face()), {}, {"inner": "model"}),
    "hugging face, reentrant": (
        lambda: OnTokens(hugging_face("reentrant")),
        {},
        {"inner": "model"},
    ),
    "hugging face, not reentrant": (
        lambda: OnTokens(hugging_face("other")),
        {},
        {"inner": "model"},
    ),
}


def train(
    make,
    monitored,
    accumulate=1,
    precision=None,
    inner=None,
    out=None,
    steps=STEPS,
    compiled=False,
    **opening,
):
    torch.manual_seed(3)
    model = make()
    called = torch.compile(model) if compiled else model
    watched = called if inner is None else getattr(model, inner)
    generator = torch.Generator().manual_seed(0)
    monitor = None
    if monitored:
        held = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(9))
        monitor = Monitor(watched, every=7, probe_every=49, held=(held, held), out=out, **opening)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    reports = []
    for _ in range(steps):
        for _ in range(accumulate):
            tokens = torch.randint(32, (2, 9), generator=generator)
            with torch.autocast("cpu", precision) if precision else contextlib.nullcontext():
                result = called(tokens[:, :-1], tokens[:, 1:])
                loss = result[1] if isinstance(result, tuple) and len(result) == 2 else result.total
            (loss / accumulate).backward()
        if monitor is not None:
            monitor.step(
                loss, optimiser, batch=(tokens[:, :-1], tokens[:, 1:]) if compiled else None
            )
            reports = list(monitor.past.reports)
        optimiser.step()
        optimiser.zero_grad()
    if monitor is not None:
        monitor.close()
    return (
        {name: weight.clone() for name, weight in model.state_dict().items()},
        reports,
        torch.rand(1),
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_weights_and_random_numbers_are_as_without(case, tmp_path):
    make, options, watching = CASES[case]
    inner = watching.get("inner")
    opening = {name: value for name, value in watching.items() if name != "inner"}
    without, _, random = train(make, False, inner=inner, **options)
    weights, reports, after = train(make, True, inner=inner, out=tmp_path, **options, **opening)
    assert all(torch.equal(weights[name], without[name]) for name in without)
    assert torch.equal(random, after)
    assert [step for step, _ in reports] == [1, *range(7, STEPS + 1, 7)]
    figures = reports[-1][1]
    for name in (
        "rms",
        "velocity",
        "step_share",
        "costate",
        "gradient",
        "update",
        "logit",
        "entropy",
    ):
        assert name in figures, name
        assert sum(value == value for value in figures[name]) >= 2, name
    assert figures["log_z"] == figures["log_z"]


COMPILED = """
import sys, torch
from tests.training.monitor.test_bits import gpt, train

without, _, _ = train(gpt, False, compiled=True, steps=100)
weights, reports, _ = train(gpt, True, compiled=True, steps=100, out=sys.argv[1])
assert all(torch.equal(weights[name], without[name]) for name in without)
assert {"rms", "logit", "log_z", "gradient", "update"} <= reports[-1][1].keys()
print("the same")
"""


def ran(command, script, out):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script.parent.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *command, str(script), str(out)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.slow
def test_a_compiled_training_is_as_without(tmp_path):
    (tmp_path / "compiled.py").write_text(COMPILED)
    done = ran([], tmp_path / "compiled.py", tmp_path / "run")
    assert done.stdout == "the same\n", done.stderr[-2000:]


WORKER = """
import sys, torch
from torch.nn.parallel import DistributedDataParallel
from tests.training.monitor.test_bits import gpt
from ctrans.training.monitor import Monitor

torch.distributed.init_process_group("gloo")
rank, out = torch.distributed.get_rank(), sys.argv[1]
kept = []
for monitored in (False, True):
    model = gpt()
    monitor = Monitor(model, every=5, out=out) if monitored else None
    wrapped = DistributedDataParallel(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(40):
        tokens = torch.randint(32, (2, 9), generator=generator)
        loss = wrapped(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        if monitor is not None:
            monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()
    kept.append(model.state_dict())
assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
monitor.close()
print("the same", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_replicated_trainings_are_as_without(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    done = ran(
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29643"],
        script,
        tmp_path / "run",
    )
    assert done.stdout.count("the same") == 2, done.stderr[-2000:]
    assert (tmp_path / "run" / "monitor.jsonl").exists()
