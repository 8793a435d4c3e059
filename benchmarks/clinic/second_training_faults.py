"""The faults of trainings that the second trial adds.

Drawn from public threads, such as spro/practical-pytorch#9 (an optimiser of another model),
huggingface/transformers#20916 (a warm-up that does not end), pytorch/torchtune's and transformers'
threads on reentrant checkpoints behind frozen embeddings, and the lists of PROTOCOL-2.md.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.clinic.course import Batch, Course, batch, cross_entropy
from benchmarks.clinic.faults import (
    EVENT,
    Fault,
    always,
    fill,
    from_event,
    optimiser,
    set_fields,
    times,
    token_model,
    weights_of,
)
from benchmarks.clinic.second_model_faults import (
    images,
    normalised_twice,
    set_in_attention,
    token_text,
    with_heads_ahead,
)

SHARE = 0.5
"""Of labels that are drawn at random, and of rows that are padding."""
DROPPED = 0.9


def optimiser_of_a_copy(course: Course) -> None:
    """The model is made anew after its optimiser, which steps the old weights."""
    course.body.model = copy.deepcopy(course.body.model)


def half_in_no_group(course: Course) -> None:
    blocks = course.body.blocks
    course.make_optimiser(without=[w for part in blocks[1:] for w in weights_of(part)])


def in_bfloat16(course: Course) -> None:
    course.body.model.bfloat16()
    course.make_optimiser()


def in_float8(course: Course, step: int) -> None:
    with torch.no_grad():
        for weight in course.body.model.parameters():
            weight.copy_(weight.to(torch.float8_e4m3fn).to(weight.dtype))


def descent_without_adam(course: Course) -> None:
    """SGD at Adam's rate."""
    groups = [{**group, "weight_decay": 0.0} for group in course.optimiser.param_groups]
    course.optimiser = torch.optim.SGD(
        [{"params": g["params"], "factor": g["factor"]} for g in groups], lr=course.rate
    )


def targets_shifted_twice(c: Course, given: Batch) -> Batch:
    return given[0][:, :-1], given[1][:, 1:]


def ids_off_by_one(c: Course, given: Batch) -> Batch:
    limit = int(c.body.part("head").shape[0])
    return (given[0] + 1) % limit, given[1]


def inputs_reversed(c: Course, given: Batch) -> Batch:
    return given[0].flip(-1), given[1]


def half_of_labels_random(c: Course, given: Batch) -> Batch:
    inputs, targets = given
    generator = torch.Generator().manual_seed(c.step)
    drawn = torch.randperm(targets.numel(), generator=generator)
    others = targets.flatten()[drawn].view_as(targets)
    chosen = torch.rand(targets.shape, generator=generator) < SHARE
    return inputs, torch.where(chosen & (targets != -1) & (others != -1), others, targets)


def every_batch_twenty_times(c: Course, given: Batch) -> Batch:
    return batch(c.task, c.body, c.step // 20, c.seed)


def padding_counted(c: Course, given: Batch) -> Batch:
    inputs, targets = (each.clone() for each in given)
    half = inputs.shape[1] // 2
    inputs[:, half:] = 0
    targets[:, half - 1 :] = 0
    return inputs, targets


def images_twice(c: Course, given: Batch) -> Batch:
    return normalised_twice(given)


Loss = Callable[[Course, int, Tensor, Tensor], Tensor]


def with_loss(loss: Loss) -> Callable[[Course], None]:
    return set_fields(loss=loss)


def minus(c: Course, step: int, logits: Tensor, targets: Tensor) -> Tensor:
    return -cross_entropy(logits, targets)


def wrong_z_loss(c: Course, step: int, logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets) - 1e-2 * logits.logsumexp(-1).square().mean()


def smoothed(c: Course, step: int, logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=-1, label_smoothing=0.9
    )


class Dropping(nn.Dropout):
    """A hook that a copy of the module keeps: dropout of an output in training."""

    def forward(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:  # type: ignore[override]
        return F.dropout(output, self.p, module.training)


def much_dropout(course: Course) -> None:
    for part in course.body.blocks:
        for linear in (part.out, part.down):
            linear.register_forward_hook(Dropping(DROPPED))


def first_detached(module: nn.Module, given: Any) -> Any:
    return (given[0].detach(), *given[1:])


def state_detached(course: Course) -> None:
    course.body.blocks[-1].whole.register_forward_pre_hook(first_detached)


def checkpointed(forward: Callable[..., Any], *given: Any, **options: Any) -> Any:
    return checkpoint(functools.partial(forward, **options), *given, use_reentrant=True)


def reentrant(course: Course) -> None:
    """Blocks are checkpointed with reentrance, and their input needs no gradient: none arrives."""
    course.body.part("embedding").requires_grad_(requires_grad=False)
    for name, weight in course.body.model.named_parameters():
        if "norm" in name and "embeddings" in name:
            weight.requires_grad_(requires_grad=False)
    for part in course.body.blocks:
        part.whole.forward = functools.partial(checkpointed, part.whole.forward)


def weights_at_start(pick: Callable[[Course], Any], factor: float) -> Callable[[Course], None]:
    return lambda course: times(pick(course), factor)


def of_blocks(name: str) -> Callable[[Course], Any]:
    return lambda course: [each for part in course.body.blocks for each in getattr(part, name)]


def last_maps(course: Course) -> Any:
    return [linear.weight for part in course.body.blocks for linear in (part.out, part.down)]


def whole_blocks(course: Course) -> bool:
    return course.body.blocks[0].whole is not None


def whole_of_text(course: Course) -> bool:
    has_constants = (
        course.body.part("residual") is not None or course.body.part("positions") is not None
    )
    return whole_blocks(course) and token_model(course) and not has_constants


def untied_tokens(course: Course) -> bool:
    return token_model(course) and not course.body.part("tied")


def drop_gains(course: Course) -> None:
    for part in course.body.blocks:
        for norm in part.norms:
            fill(norm.weight, 1e-3)


ADDED: dict[str, Fault] = {
    "optimiser of an older copy": Fault("frozen", "", optimiser_of_a_copy, "train all"),
    "blocks in no group": Fault("frozen", "", half_in_no_group, "train all"),
    "rate of 1e-6": Fault("stalled", "", set_fields(rate=1e-6), "higher rate"),
    "warm-up that never ends": Fault("stalled", "", set_fields(warm_up=10**5), "higher rate"),
    "schedule by micro-batches": Fault(
        "stalled", "", set_fields(ends_at=60), "steps as planned", start=60
    ),
    "gradients clipped at 1e-8": Fault("stalled", "", set_fields(clip=1e-8), "usual eps and scale"),
    "SGD at Adam's rate": Fault("stalled", "", descent_without_adam, "steps as planned"),
    "weights in bfloat16": Fault("precision", "", in_bfloat16, "", fits=token_model),
    "weights in float8": Fault("precision", "", set_fields(after=in_float8), ""),
    "betas of .999": Fault("moments", "", optimiser(betas=(0.999, 0.999)), "usual betas"),
    "decay of 10": Fault("decay", "", optimiser(decay=10.0), "usual betas"),
    "ids off by one half-way": Fault(
        "labels", "", from_event(ids_off_by_one), "own data", start=EVENT, fits=untied_tokens
    ),
    "targets shifted twice": Fault(
        "targets", "", always(targets_shifted_twice), "own data", fits=token_text
    ),
    "inputs reversed": Fault("labels", "", always(inputs_reversed), "own data", fits=token_text),
    "half of the labels random": Fault("labels", "", always(half_of_labels_random), "own data"),
    "every batch twenty times": Fault("repeats", "", always(every_batch_twenty_times), "own data"),
    "padding counted": Fault("padding", "", always(padding_counted), "own data", fits=token_text),
    "images normalised twice half-way": Fault(
        "data", "", from_event(images_twice), "own data", start=EVENT, fits=images
    ),
    "loss of the wrong sign": Fault("loss", "", with_loss(minus), "plain loss"),
    "z-loss of the wrong sign": Fault("loss", "", with_loss(wrong_z_loss), "plain loss"),
    "label smoothing of .9": Fault("loss", "", with_loss(smoothed), "plain loss"),
    "dropout of .9": Fault("noise", "", much_dropout, "no hooks"),
    "state detached before the last block": Fault(
        "cut path", "", state_detached, "no hooks", fits=whole_blocks
    ),
    "reentrant checkpoints": Fault("frozen", "", reentrant, "", fits=whole_of_text),
    "embedding drawn 50 times too large": Fault(
        "embedding",
        "",
        weights_at_start(lambda c: [c.body.part("embedding")], 50),
        "smaller embedding",
    ),
    "queries drawn 30 times too large": Fault(
        "attention scale", "", weights_at_start(of_blocks("q"), 30), "scores by neighbours"
    ),
    "last maps drawn 50 times too large": Fault(
        "sublayer scale", "", weights_at_start(last_maps, 50), "smaller steps"
    ),
    "gains of .001 at the start": Fault(
        "gains", "", drop_gains, "unit gains", fits=lambda c: bool(c.body.blocks[1].norms)
    ),
    "mask one token late in training": Fault(
        "leak",
        "",
        set_in_attention("ahead", 1),
        "mask",
        fits=with_heads_ahead,
        wrong_by_definition=True,
    ),
    "softmax over the queries in training": Fault(
        "softmax axis", "", set_in_attention("softmax_axis", -2), "", fits=with_heads_ahead
    ),
}
"""By name. None of them was in the first trial."""
