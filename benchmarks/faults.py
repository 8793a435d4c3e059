"""Induces ten known faults, one at a time, in a small training: is the right alarm the first?

    python benchmarks/faults.py            # the table; --keep writes it to benchmarks/results
    python benchmarks/faults.py --only post

Each training has 4 blocks of width 32, reads Python's language documentation and reports every 5
steps. Apart from the fault it is healthy. An eleventh training has no fault and should raise no
alarm. An alarm is right if it names the fault, or its first effect: `FAULTS` has the sets.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# in place of this file's own folder, where `import solvers` would find another file
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from torch import nn

from benchmarks.record import keep
from ctrans import GPT, GPTConfig
from ctrans.measure.findings import Finding
from ctrans.model.text import default_text
from ctrans.training.monitor import Monitor

SIZE = {"vocab_size": 256, "context": 32, "depth": 4, "width": 32, "heads": 4, "embedding_std": 0.1}
STEPS, EVERY, RATE, WARM_UP = 120, 5, 3e-3, 60


@dataclasses.dataclass
class Training:
    """What a fault may spoil: the model, its optimiser, the rate's schedule, and what happens
    before each step.
    """

    model: nn.Module
    optimiser: torch.optim.Optimizer
    rate: Callable[[int], float]
    before: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, rows: rows
    after: Callable[[int], None] = lambda step: None
    clip: float = 1.0


def warmed(step: int) -> float:
    return RATE * min(1.0, (step + 1) / WARM_UP)


def adam(model: nn.Module, betas: tuple[float, float] = (0.9, 0.99)) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=betas, weight_decay=0.1)


def gpt(**options: Any) -> GPT:
    return GPT(GPTConfig(**{**SIZE, "placement": "pre", **options}), seed=0)


def none() -> Training:
    model = gpt()
    return Training(model, adam(model), warmed)


def query_gain() -> Training:
    """Queries that grow by 6% a step in block 2, as an unfortunate learning rate of theirs would
    have it.
    """
    model = gpt()
    weight = model.depth.sublayers[4].field.qkv.weight

    def grow(step: int) -> None:
        if step >= 30:
            with torch.no_grad():
                weight[: SIZE["width"]] *= 1.06

    return Training(model, adam(model), warmed, after=grow)


def no_warm_up() -> Training:
    """Post-LN of 8 blocks at a rate that needs a warm-up, without one."""
    model = gpt(placement="post", depth=8, embedding_std=1.0)
    return Training(model, adam(model), lambda step: 3e-2)


def overflow() -> Training:
    """The model in float16, a last map that grows by 10% a step."""
    model = gpt().half()
    weight = model.depth.sublayers[3].field.output_projection.weight

    def grow(step: int) -> None:
        with torch.no_grad():
            weight.mul_(1.1)

    return Training(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda step: 1e-3, after=grow
    )


def corrupted_batch() -> Training:
    """Step 90 reads random bytes."""
    model = gpt()
    generator = torch.Generator().manual_seed(5)

    def spoil(step: int, rows: torch.Tensor) -> torch.Tensor:
        return torch.randint(256, rows.shape, generator=generator) if step == 90 else rows

    return Training(model, adam(model), warmed, before=spoil)


def dead_layer() -> Training:
    """ReLUs of block 1 that never fire."""
    model = gpt(activation="relu")
    model.depth.sublayers[3].field.up.bias.data.fill_(-100.0)
    return Training(model, adam(model), warmed)


def large_beta() -> Training:
    """beta_2 = 0.9999 and gradients that grow by 5% a step, as of a loss whose weight is raised;
    they are not clipped.
    """
    model, scale = gpt(), [1.0]
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * scale[0])

    def raise_weight(step: int) -> None:
        scale[0] *= 1.05

    return Training(model, adam(model, (0.9, 0.9999)), warmed, after=raise_weight, clip=1e30)


def exploding_embedding() -> Training:
    """An embedding with 300 times the learning rate."""
    model = gpt(embedding_std=0.02)
    own = {id(p) for p in (model.token_embedding.weight, model.position_embedding.weight)}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in own], "scale": 300.0},
        {"params": [p for p in model.parameters() if id(p) not in own], "scale": 1.0},
    ]
    return Training(model, torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99)), warmed)


def router_collapse() -> Training:
    """A mixture of 8 experts whose router prefers one of them ever more."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        max_position_embeddings=32,
    )
    model = MixtralForCausalLM(config)
    favoured = [part for name, part in model.named_parameters() if name.endswith("gate.weight")]

    def prefer(step: int) -> None:
        with torch.no_grad():
            for weight in favoured:
                weight[1:] *= 0.9

    class Biased(nn.Module):
        """As the others are called."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[None, torch.Tensor]:
            return None, self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    for weight in favoured:  # one expert's row is along what all states have in common
        weight.data[0] *= 4.0
    with torch.no_grad():
        model.model.embed_tokens.weight += 0.05 * favoured[0][0].sign()
    return Training(Biased(), torch.optim.AdamW(model.parameters(), lr=RATE), warmed, after=prefer)


def frozen_layer() -> Training:
    """Block 1's attention is not given to the optimiser."""
    model = gpt()
    left_out = {id(p) for p in model.depth.sublayers[2].parameters()}
    return Training(
        model,
        torch.optim.AdamW([p for p in model.parameters() if id(p) not in left_out], lr=RATE),
        warmed,
    )


def large_dt() -> Training:
    """Peri-LN with dt = 30."""
    model = gpt(placement="peri", dt=30.0)
    for k, part in enumerate(model.depth.sublayers):  # each step is longer than the state before it
        part.output_norm.weight.data.fill_(0.02 * 2.5**k)
    return Training(model, adam(model), warmed)


FAULTS: dict[str, tuple[Callable[[], Training], set[str]]] = {
    "a large query gain": (query_gain, {"attention logits grow", "attention collapsed"}),
    "no warm-up for post": (
        no_warm_up,
        {"updates too large", "gradients die by depth", "gradients explode by depth"},
    ),
    "fp16 overflow": (overflow, {"near the end of float16", "not finite"}),
    "a corrupted batch": (corrupted_batch, {"loss spike", "gradient spike"}),
    "a dead layer": (dead_layer, {"dead layer"}),
    "too large beta_2": (
        large_beta,
        {"Adam's second moments too small", "Adam's second moments too large"},
    ),
    "an exploding embedding": (exploding_embedding, {"embedding grows"}),
    "router collapse": (router_collapse, {"router collapse"}),
    "a frozen layer": (frozen_layer, {"frozen layer"}),
    "dt too large": (large_dt, {"discrete step far from the ODE's"}),
}


def watched(training: Training) -> list[Finding]:
    """The alarms of that training, in the order in which they are told."""
    text = torch.frombuffer(bytearray(default_text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    inner = getattr(training.model, "model", training.model)
    monitor = Monitor(inner, every=EVERY, clip=training.clip)
    for step in range(STEPS):
        for group in training.optimiser.param_groups:
            group["lr"] = training.rate(step) * group.get("scale", 1.0)
        places = torch.randint(len(text) - 33, (8,), generator=generator)
        rows = training.before(step, torch.stack([text[p : p + 33] for p in places.tolist()]))
        loss = training.model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in training.model.parameters() if p.grad is not None]
        )
        monitor.step(loss, training.optimiser, gradient_norm=norm)
        torch.nn.utils.clip_grads_with_norm_(training.model.parameters(), training.clip, norm)
        training.optimiser.step()
        training.optimiser.zero_grad()
        training.after(step)
        if not torch.isfinite(loss):
            break
    monitor.close()
    return monitor.alarms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines, right = [], 0
    for name, (make, expected) in {"no fault": (none, set[str]()), **FAULTS}.items():
        if given.only not in name:
            continue
        alarms = watched(make())
        first = alarms[0].check if alarms else "nothing"
        hit = first in expected if expected else not alarms
        right += hit and bool(expected)
        later = ", ".join(f"{alarm.check} ({alarm.step})" for alarm in alarms[1:4])
        where = f" at step {alarms[0].step}, {alarms[0].place}" if alarms else ""
        lines.append(
            f"{'right' if hit else 'WRONG'}  {name:24s} {first}{where}"
            + (f"; then {later}" if later else "")
        )
        print(lines[-1], flush=True)
    lines.append(f"the right alarm is first in {right} of {len(FAULTS)}")
    print(lines[-1])
    if given.keep:
        keep("faults", lines)


if __name__ == "__main__":
    main()
