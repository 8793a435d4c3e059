"""The trial of what the monitor reads of a loop: faults of a training loop in models of other
libraries and of plain torch, and loops that are unusual and well.

    python benchmarks/loops.py [MODEL ..]

A fault is found if an alarm names it, and its cause is first if that alarm comes first, or first of
its report. Loops that are well count the runs with any alarm of the loop, and with any alarm above
a note. The limits were set on the models of tests/training/monitor/test_loop.py, not on these; the
faults are those that the alarms were made for.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()
warnings.simplefilter("ignore")

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.clinic.judging import share_of
from benchmarks.edit_models import BYTES, CONTEXT, MODELS, TEXT, logits
from benchmarks.record import keep
from ctrans.measure.findings import Finding
from ctrans.training.monitor import ALARMS, Monitor
from ctrans.training.monitor.loop_measures import LOOP

STEPS, EVERY, ROWS, RATE = 260, 20, 8, 2e-3
HIDDEN, IGNORED, PADDING = 255, -100, 0
CLASSES, CHANNELS, SIDE = 10, 3, 16
Batch = tuple[Tensor, Tensor]
OF_THE_LOOP = {name for name, check in ALARMS.items() if check.quantity in LOOP}


def text_batch(step: int, generator: torch.Generator, rows: int = ROWS) -> Batch:
    """Bytes of a text, and the next ones."""
    places = torch.randint(0, len(TEXT) - CONTEXT - 1, (rows,), generator=generator)
    cut = torch.stack([TEXT[place : place + CONTEXT + 1] for place in places.tolist()])
    return cut[:, :-1], cut[:, 1:]


def hidden_batch(step: int, generator: torch.Generator, rows: int = ROWS) -> Batch:
    """Bytes of which 15% are hidden, and those."""
    tokens, _ = text_batch(step, generator, rows)
    hide = torch.rand(tokens.shape, generator=generator) < 0.15
    return torch.where(hide, HIDDEN, tokens), torch.where(hide, tokens, IGNORED)


def image_batch(step: int, generator: torch.Generator, rows: int = ROWS) -> Batch:
    """Noisy images of ten patterns, and which pattern each has."""
    patterns = torch.randn(
        CLASSES, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(5)
    )
    labels = torch.randint(CLASSES, (2 * rows,), generator=generator)
    noise = torch.randn(2 * rows, CHANNELS, SIDE, SIDE, generator=generator)
    return patterns[labels] + 2 * noise, labels


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=BYTES,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=160,
            max_position_embeddings=64,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=160,
            image_size=SIDE,
            patch_size=4,
            num_labels=CLASSES,
        )
    )


def mean_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), RATE)]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training loop. `optimizers` are made of the model; the monitor gets the first one."""

    batch: Callable[[int, torch.Generator], Batch] = text_batch
    loss: Callable[[Tensor, Tensor], Tensor] = mean_loss
    passes: int = 1
    divided: bool = True
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = adamw
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    rate: Callable[[int], float] = lambda step: min(1.0, (step + 1) / 40)
    scale: float | None = None
    forgets_at: int | None = None


def after(batch: Callable[..., Batch], change: Callable[[Tensor, Tensor], Batch]) -> Any:
    return lambda step, generator: change(*batch(step, generator))


def shuffled(inputs: Tensor, targets: Tensor) -> Batch:
    order = torch.randperm(
        targets.numel(), generator=torch.Generator().manual_seed(int(targets.sum()))
    )
    return inputs, targets.flatten()[order].view_as(targets)


def padded(inputs: Tensor, targets: Tensor) -> Batch:
    """The second half of each sequence is padding, which counts."""
    half = CONTEXT // 2
    return (
        torch.cat([inputs[:, :half], torch.full_like(inputs[:, half:], PADDING)], 1),
        torch.cat([targets[:, : half - 1], torch.full_like(targets[:, half - 1 :], PADDING)], 1),
    )


def ignored(inputs: Tensor, targets: Tensor) -> Batch:
    """The same padding, which does not count."""
    inputs, targets = padded(inputs, targets)
    targets[:, CONTEXT // 2 - 1 :] = IGNORED
    return inputs, targets


def prompts(inputs: Tensor, targets: Tensor) -> Batch:
    """Only the last quarter of each sequence counts, as for answers."""
    targets = targets.clone()
    targets[:, : 3 * CONTEXT // 4] = IGNORED
    return inputs, targets


def another_tokenizer(step: int, generator: torch.Generator) -> Batch:
    inputs, targets = text_batch(step, generator)
    if step < STEPS * 2 // 3:
        return inputs, targets
    order = torch.randperm(BYTES, generator=torch.Generator().manual_seed(9))
    return order[inputs], order[targets]


def one_batch(batch: Callable[..., Batch]) -> Any:
    return lambda step, generator: batch(0, torch.Generator().manual_seed(1))


def short_and_long(step: int, generator: torch.Generator) -> Batch:
    inputs, targets = text_batch(step, generator)
    length = next(LENGTHS)
    return inputs[:, :length], targets[:, :length]


LENGTHS = itertools.cycle([CONTEXT, CONTEXT // 4])


def half_of_blocks(model: nn.Module) -> list[torch.optim.Optimizer]:
    blocks = max(
        (part for part in model.modules() if isinstance(part, nn.ModuleList)), key=lambda m: len(m)
    )
    left_out = {id(p) for block in list(blocks)[::2] for p in block.parameters()}
    return [torch.optim.AdamW([p for p in model.parameters() if id(p) not in left_out], RATE)]


def of_another_model(model: nn.Module) -> list[torch.optim.Optimizer]:
    import copy

    return adamw(copy.deepcopy(model))


def slow(rate: float) -> Any:
    return lambda model: [torch.optim.AdamW(model.parameters(), rate)]


def by_kind(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Matrices of the blocks by one optimizer, everything else by another."""
    matrices = [p for p in model.parameters() if p.dim() == 2 and p.shape[0] < BYTES]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.SGD(matrices, 0.05, momentum=0.9), torch.optim.AdamW(others, RATE)]


def decayed_apart(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), eps=1e-8)]


def smoothed(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        scores.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=0.1
    )


def with_z_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return mean_loss(scores, targets) + 1e-4 * scores.logsumexp(-1).square().mean()


def summed(scores: Tensor, targets: Tensor) -> Tensor:
    return mean_loss(scores, targets) * (targets != IGNORED).sum()


LANGUAGE = ("rotary", "joined", "llama", "gpt2")
OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "bert": (bert, hidden_batch),
    "vit": (vit, image_batch),
}
Given = Callable[[Callable[..., Batch]], Loop]
FAULTS: dict[str, tuple[str, Given]] = {
    "minus before the loss": (
        "loss is raised",
        lambda batch: Loop(batch, loss=lambda scores, y: -mean_loss(scores, y)),
    ),
    "accumulated, not divided": (
        "accumulation is not divided",
        lambda batch: Loop(batch, passes=2, divided=False),
    ),
    "labels shuffled": (
        "targets unrelated to inputs",
        lambda batch: Loop(after(batch, shuffled)),
    ),
    "the same batch": ("same batch again", lambda batch: Loop(one_batch(batch))),
    "optimizer of another model": (
        "weights in no group",
        lambda batch: Loop(batch, optimizers=of_another_model),
    ),
    "half of the blocks in no group": (
        "weights in no group",
        lambda batch: Loop(batch, optimizers=half_of_blocks),
    ),
    "rate of 1e-7": ("no better than guessing", lambda batch: Loop(batch, optimizers=slow(1e-7))),
    "bfloat16 weights, rate of 2e-5": (
        "steps are lost to rounding",
        lambda batch: Loop(batch, optimizers=slow(2e-5), dtype=torch.bfloat16),
    ),
    "optimizer made anew": (
        "optimizer forgot its past",
        lambda batch: Loop(batch, forgets_at=STEPS // 2),
    ),
}
TEXT_FAULTS: dict[str, tuple[str, Given]] = {
    "targets are the inputs": (
        "targets are not the next tokens",
        lambda batch: Loop(after(batch, lambda x, y: (x, x))),
    ),
    "targets shifted twice": (
        "targets are not the next tokens",
        lambda batch: Loop(after(batch, lambda x, y: (x[:, :-1], y[:, 1:]))),
    ),
    "padding counts": ("padding is predicted", lambda batch: Loop(after(batch, padded))),
    "one token": (
        "one token fills the batch",
        lambda batch: Loop(after(batch, lambda x, y: (x * 0 + 65, y * 0 + 65))),
    ),
    "another tokenizer": (
        "tokens unlike those before",
        lambda batch: Loop(another_tokenizer),
    ),
    "passes of other lengths": (
        "targets count unequally",
        lambda batch: Loop(short_and_long, passes=2),
    ),
}
WELL: dict[str, Given] = {
    "plain": lambda batch: Loop(batch),
    "accumulated": lambda batch: Loop(batch, passes=2),
    "label smoothing": lambda batch: Loop(batch, loss=smoothed),
    "z-loss": lambda batch: Loop(batch, loss=with_z_loss),
    "sum over targets": lambda batch: Loop(batch, loss=summed),
    "bfloat16 autocast": lambda batch: Loop(batch, autocast=True),
    "loss scale": lambda batch: Loop(batch, scale=4096.0),
    "two optimizers": lambda batch: Loop(batch, optimizers=by_kind),
    "decay of matrices": lambda batch: Loop(batch, optimizers=decayed_apart),
    "a tenth of the rate": lambda batch: Loop(batch, optimizers=slow(2e-4)),
}
TEXT_WELL: dict[str, Given] = {
    "padding ignored": lambda batch: Loop(after(batch, ignored)),
    "answers only": lambda batch: Loop(after(batch, prompts)),
}


def alarms_of(make: Callable[[], nn.Module], loop: Loop, seed: int) -> list[Finding]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = make().train().to(loop.dtype)
    optimizers = loop.optimizers(model)
    inputs, _ = loop.batch(0, torch.Generator())
    options: dict[str, Any] = {}
    if not hasattr(model, "config"):
        options["example"] = inputs
    scale = loop.scale or 1.0
    if loop.scale is not None:
        options["scale"] = lambda: scale
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    alarms: list[Finding] = []
    with Monitor(model, every=EVERY, **options) as monitor:
        for step in range(STEPS):
            if step == loop.forgets_at:
                optimizers = loop.optimizers(model)
            for optimizer, of_groups in zip(optimizers, rates, strict=True):
                for group, rate in zip(optimizer.param_groups, of_groups, strict=True):
                    group["lr"] = rate * loop.rate(step)
            for _ in range(loop.passes):
                inputs, targets = loop.batch(step, generator)
                if inputs.is_floating_point():
                    inputs = inputs.to(loop.dtype)
                with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
                    scores = logits(model, inputs)
                loss = loop.loss(scores.float(), targets)
                if loop.divided:
                    loss = loss / loop.passes
                (scale * loss).backward()
            alarms += monitor.step(loss, optimizers[0])
            for optimizer in optimizers:
                if scale != 1:
                    for group in optimizer.param_groups:
                        for p in group["params"]:
                            if p.grad is not None:
                                p.grad /= scale
                optimizer.step()
            model.zero_grad()
    return alarms


def cases(names: Sequence[str]) -> Iterable[tuple[str, Callable[[], nn.Module], Any, bool]]:
    for name in names:
        if name in LANGUAGE:
            yield name, MODELS[name].make, text_batch, True
        else:
            make, batch = OTHERS[name]
            yield name, make, batch, False


def in_words(alarms: Sequence[Finding]) -> str:
    return ", ".join(f"{alarm.check} ({alarm.step})" for alarm in alarms[:3]) or "-"


def faults(names: Sequence[str]) -> list[str]:
    lines = ["model    fault                           found  first  first three alarms (step)"]
    count = found = first = 0
    for name, make, batch, is_text in cases(names):
        for fault, (wanted, given) in {**FAULTS, **(TEXT_FAULTS if is_text else {})}.items():
            alarms = alarms_of(make, given(batch), 0)
            # of balanced classes the loss is that of guessing
            if wanted == "targets unrelated to inputs" and name == "vit":
                wanted = "no better than guessing"
            is_found = any(alarm.check == wanted for alarm in alarms)
            is_first = bool(alarms) and alarms[0].check == wanted
            count += 1
            found += is_found
            first += is_first
            marks = f"{'yes' if is_found else 'no':6} {'yes' if is_first else 'no':6}"
            lines.append(f"{name:8} {fault:31} {marks} {in_words(alarms)}")
            print(lines[-1], flush=True)
    return [*lines, "", f"found {share_of(found, count)}; named first {share_of(first, count)}"]


def well(names: Sequence[str]) -> list[str]:
    lines = ["model    loop                 seed  alarms (step)"]
    count = of_loop = above_note = 0
    for name, make, batch, is_text in cases(names):
        for loop, given in {**WELL, **(TEXT_WELL if is_text else {})}.items():
            for seed in (1, 2):
                alarms = alarms_of(make, given(batch), seed)
                count += 1
                of_loop += any(alarm.check in OF_THE_LOOP for alarm in alarms)
                above_note += any(alarm.severity != "note" for alarm in alarms)
                if alarms:
                    lines.append(f"{name:8} {loop:20} {seed:4}  {in_words(alarms)}")
                    print(lines[-1], flush=True)
    return [
        *lines,
        "",
        f"loops that are well with an alarm of the loop {share_of(of_loop, count)};"
        f" with any alarm above a note {share_of(above_note, count)}",
    ]


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    names = sys.argv[1:] or [*LANGUAGE, *OTHERS]
    start = time.perf_counter()
    lines = [f"{STEPS} steps, a report every {EVERY}; batches of {ROWS} sequences", ""]
    lines += [*faults(names), "", *well(names)]
    lines += ["", f"{(time.perf_counter() - start) / 60:.0f} minutes"]
    keep("loops", lines)


if __name__ == "__main__":
    main()
