"""Sealed faults of a training as scripts, for the peers that read or trace a script.

Each is `HEALTHY` with some lines replaced, so that a peer sees the fault as a user would write it.
"""

from __future__ import annotations

HEALTHY = """\
import copy
import functools

import torch
import torch.nn.functional as F

from benchmarks.clinic.architectures import make
from benchmarks.clinic.course import batch

STEPS, RATE, WARM_UP = 20, 3e-3, 5
torch.manual_seed(42)
body = make("nanochat", "text", 42)
model = body.model
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
model.train()
for step in range(STEPS):
    inputs, targets = batch("text", body, step, 42)
    for group in optimizer.param_groups:
        group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
    optimizer.zero_grad()
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item())
"""
BATCH = '    inputs, targets = batch("text", body, step, 42)\n'
MODEL = "model = body.model\n"
TRAIN = "model.train()\n"
PARAMETERS = "torch.optim.AdamW(model.parameters(),"
CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
STEP = "    optimizer.step()\n"
LOSS = "    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())\n"
Change = tuple[str, str]
CHANGES: dict[str, tuple[Change, ...]] = {
    "label smoothing of .9": (("targets.flatten())", "targets.flatten(), label_smoothing=0.9)"),),
    "decay of 10": (("weight_decay=0.1", "weight_decay=10.0"),),
    "targets shifted twice": (
        (BATCH, BATCH + "    inputs, targets = inputs[:, :-1], targets[:, 1:]\n"),
    ),
    "no causal mask": ((TRAIN, "for block in model.h:\n    block.attn.causal = False\n" + TRAIN),),
    "the same batch for ever": (("body, step, 42)", "body, 0, 42)"),),
    "betas of .9 and .9999": (("(0.9, 0.99)", "(0.9, 0.9999)"),),
    "labels not shifted": ((BATCH, BATCH + "    targets = inputs\n"),),
    "optimiser of an older copy": ((TRAIN, "model = copy.deepcopy(model)\n" + TRAIN),),
    "blocks in no group": (
        (PARAMETERS, "torch.optim.AdamW([*model.wte.parameters(), *model.h[0].parameters()],"),
    ),
    "queries that grow": (
        (STEP, STEP + "    with torch.no_grad():\n        model.h[1].attn.c_q.weight.mul_(1.06)\n"),
    ),
    "a path cut by detach": (
        (
            TRAIN,
            "model.h[1].attn.c_proj.register_forward_hook(lambda module, args, out: out.detach())\n"
            + TRAIN,
        ),
    ),
    "moments lost on resumption": (
        (
            STEP,
            STEP
            + "    if step == 10:\n        RATE *= 10\n"
            + "        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)\n",
        ),
    ),
    "padding counted": ((BATCH, BATCH + "    inputs[:, 16:] = 0\n    targets[:, 15:] = 0\n"),),
    "gradients clipped at 1e-8": (("parameters(), 1.0)", "parameters(), 1e-8)"),),
    "ids off by one half-way": (
        (BATCH, BATCH + "    if step >= 10:\n        inputs = (inputs + 1) % 257\n"),
    ),
    "queries drawn 30 times too large": (
        (
            TRAIN,
            "for block in model.h:\n    block.attn.c_q.weight.data.mul_(30)\n" + TRAIN,
        ),
    ),
    "warm-up that never ends": (("WARM_UP = 20, 3e-3, 5", "WARM_UP = 20, 3e-3, 100000"),),
    "an embedding that runs away": (
        (
            PARAMETERS,
            'torch.optim.AdamW([{"params": [p]} for p in model.parameters()],',
        ),
        (STEP, '    optimizer.param_groups[2]["lr"] *= 300\n' + STEP),
    ),
    "softmax over the queries in training": (
        (TRAIN, "for block in model.h:\n    block.attn.softmax_axis = -2\n" + TRAIN),
    ),
    "a last map that grows": (
        (
            STEP,
            STEP + "    with torch.no_grad():\n        model.h[1].mlp.c_proj.weight.mul_(1.05)\n",
        ),
    ),
    "embedding drawn 50 times too large": ((TRAIN, "model.wte.weight.data.mul_(50)\n" + TRAIN),),
    "gradients never reset": (("    optimizer.zero_grad()\n", ""),),
    "reentrant checkpoints": (
        (
            TRAIN,
            "from torch.utils.checkpoint import checkpoint\n"
            "model.wte.weight.requires_grad_(False)\n"
            "model.x0_lambdas.requires_grad_(False)\n"
            "model.resid_lambdas.requires_grad_(False)\n"
            "for block in model.h:\n"
            "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)\n"
            + TRAIN,
        ),
    ),
    "half of the labels random": (
        (
            BATCH,
            BATCH
            + "    others = targets.flatten()[torch.randperm(targets.numel())].view_as(targets)\n"
            + "    targets = torch.where(torch.rand(targets.shape) < 0.5, others, targets)\n",
        ),
    ),
    "Adam's eps of 1": (("eps=1e-8", "eps=1.0"),),
    "schedule by micro-batches": (
        (
            STEP,
            "    if step >= 5:\n        for group in optimizer.param_groups:\n"
            '            group["lr"] = 0.0\n' + STEP,
        ),
    ),
}
"""By fault: what is replaced in `HEALTHY`. "gains of .001 at the start" does not fit: no gains."""


def script(fault: str) -> str:
    """The script of a fault; that of the control for "". Raises ValueError for lines that are not
    there.
    """
    text = HEALTHY
    for old, new in CHANGES[fault] if fault else ():
        if old not in text:
            raise ValueError(f"{fault}: {old!r} is not in the healthy script")
        text = text.replace(old, new, 1)
    return text
