"""The trial of the search over edits: faults of porting and loading in four trained models, the
same models without a fault on their own and on other texts, and as many random edits.

    python benchmarks/edits.py [MODEL ..]

A fault needs a fix if it raises the loss by 0.1 nats or more. It is undone if the search brings the
loss back to within 0.02 nats of the model without it. The search was made on earlier runs of these
faults, so that this is no trial of unknown ones.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()
warnings.simplefilter("ignore")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.clinic.judging import share_of
from benchmarks.edit_faults import FAULTS
from benchmarks.edit_models import HELD_OUT, MODELS, TEXT, logits, trained, windows
from benchmarks.record import keep
from ctrans.examine.search.edit import Changes, Edit, Subject
from ctrans.examine.search.edit_search import EditSearch, search_edits
from ctrans.examine.search.edits import edits_of
from ctrans.interop import open_model

TRAINED, EARLY, ROWS, SECONDS = 1200, 150, 32, 600.0
NEEDS, RESTORED = 0.1, 0.02
SEEDS = {TRAINED: (0,), EARLY: (0, 1, 2)}
"""Of the healthy models, by the steps of their training."""
TEXT_SEED, SHUFFLE_SEED, PLACEBO_SEED = 77, 1, 3


def held_out() -> tuple[Tensor, Tensor]:
    return windows(TEXT[int(len(TEXT) * (1 - HELD_OUT)) :], ROWS, TEXT_SEED)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        found = F.cross_entropy(logits(model, tokens).flatten(0, 1), targets.flatten())
    return float(found)


def searched(model: nn.Module, tokens: Tensor, targets: Tensor, **options: object) -> EditSearch:
    if hasattr(model, "config"):
        opened = open_model(model)
    else:
        opened = open_model(model, example=tokens[:2])
    return search_edits(opened, tokens, targets, seconds=SECONDS, **options)


def placebo(subject: Subject) -> Iterator[Edit]:
    """As many edits as the search has, each the rows of a random weight in a random order."""
    generator = torch.Generator().manual_seed(PLACEBO_SEED)
    names = [name for name, weight in subject.sites.weights.items() if weight.dim() == 2]
    for i in range(len(edits_of(subject))):
        name = names[int(torch.randint(len(names), (), generator=generator))]
        order = torch.randperm(len(subject.sites.weights[name]), generator=generator)
        yield Edit(f"random order {i}", name, partial(_reordered, subject, name, order))


def _reordered(subject: Subject, name: str, order: Tensor) -> Changes:
    return {name: subject.sites.weights[name][order]}


def other_texts() -> dict[str, Tensor]:
    text = bytes(TEXT.to(torch.uint8).tolist())
    source = b"".join(path.read_bytes() for path in sorted(Path("solvers").glob("*.py")))
    shuffled = torch.randperm(len(TEXT), generator=torch.Generator().manual_seed(SHUFFLE_SEED))
    return {
        "source code": torch.tensor(list(source[:200_000])),
        "shuffled": TEXT[shuffled],
        "reversed": TEXT.flip(0),
        "capitals": torch.tensor(list(text.upper())),
        "numbers": torch.tensor(list(" ".join(str(i * i) for i in range(20_000)).encode())),
    }


def faults(names: Sequence[str]) -> list[str]:
    lines = ["model    fault                                     without   with  after  edit"]
    needing = found = undone = placebos = 0
    for name in names:
        body = MODELS[name]
        tokens, targets = held_out()
        without = loss_of(trained(name, TRAINED), tokens, targets)
        for fault_name, fault in FAULTS.items():
            model = trained(name, TRAINED)
            torch.manual_seed(0)
            try:
                with torch.no_grad():
                    fault(model, body)
            except LookupError:
                continue
            loss = loss_of(model, tokens, targets)
            start = time.perf_counter()
            result = searched(model, tokens, targets)
            seconds = time.perf_counter() - start
            after = loss
            words = "-"
            if result.found:
                last = result.found[-1]
                after = (last.after + last.confirmed_after) / 2
                words = "; then ".join(each.edit.words for each in result.found)
            needs = loss - without >= NEEDS
            if needs:
                needing += 1
                found += bool(result.found)
                undone += after - without <= RESTORED
                random_edits = searched(model, tokens, targets, kinds={"placebo": placebo})
                placebos += bool(random_edits.found)
            lines.append(
                f"{name:8} {fault_name:41} {without:7.2f} {loss:6.2f} {after:6.2f}  {words}"
                f"{'' if needs else '  (needs no fix)'}  [{result.tried} edits, {seconds:.0f} s]"
            )
            print(lines[-1], flush=True)
    lines += [
        "",
        f"of those that need a fix: some edit found {share_of(found, needing)}, loss restored"
        f" {share_of(undone, needing)}; by as many random edits some found {share_of(placebos, needing)}",
    ]
    return lines


def healthy(names: Sequence[str]) -> list[str]:
    lines = []
    own_text = other = of_own = of_other = 0
    for name in names:
        for steps, seeds in SEEDS.items():
            for seed in seeds:
                model = trained(name, steps, seed)
                result = searched(model, *held_out())
                of_own += 1
                own_text += bool(result.found)
                if result.found:
                    lines.append(f"{name} after {steps} steps, seed {seed}: {result.found[0]}")
            for text_name, text in other_texts().items():
                result = searched(trained(name, steps), *windows(text, ROWS, TEXT_SEED))
                of_other += 1
                other += bool(result.found)
                if result.found:
                    lines.append(f"{name} after {steps} steps on {text_name}: {result.found[0]}")
    return [
        f"healthy models on their own text with an edit: {share_of(own_text, of_own)}",
        f"healthy models on other texts with an edit: {share_of(other, of_other)}",
        *lines,
    ]


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(MODELS)
    keep("edits", [*faults(chosen), "", *healthy(chosen)])
