"""The faults of the clinic, each one entry: what is put in, where, and the treatment that undoes
it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.clinic.bodies import BLOCKS, Parts, redraw
from benchmarks.clinic.course import Batch, Course, cross_entropy

BLOCK = 1
"""The block that a fault of a single block spoils; the blocks beside it stay healthy."""
HERE = f"block {BLOCK}"
EVENT = 130
"""The step of a training at which a fault begins that does not stand from the start."""
Put = Callable[[Course], None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault.

    - `category`: what kind of cause it is, a key of `CATEGORIES` in `judging`
    - `place`: a word that the place of a right finding has; "" where the fault has no place
    - `put`: puts it into a trained model, or into a training at its start
    - `cure`: the treatment of `treatments.TREATMENTS` that undoes it; "" where only the data can be
      put right
    - `start`, `gradual`: of a training, its first step, and whether it grows from step to step
    - `stands`: of a model, whether it is in the code, and so in a model that is trained again
    - `fits`: whether an architecture and a task have what it spoils
    - `wrong_by_definition`: it needs a fix whatever the loss is, as where later tokens are read
    - `undone_by_search`: of a model, whether one of the kinds of edits that issue 57 lists undoes it
    """

    category: str
    place: str
    put: Put
    cure: str
    start: int = 0
    gradual: bool = False
    fits: Callable[[Course], bool] = lambda course: True
    stands: bool = False
    wrong_by_definition: bool = False
    undone_by_search: bool = False


def block(course: Course, k: int = BLOCK) -> Parts:
    return course.body.blocks[k]


def times(tensors: Any, factor: float) -> None:
    with torch.no_grad():
        for each in tensors:
            each.mul_(factor)


def fill(tensor: Any, value: float) -> None:
    with torch.no_grad():
        tensor.fill_(value)


def has(name: str) -> Callable[[Course], bool]:
    return lambda course: course.body.part(name) is not None


def causal_switch(course: Course) -> bool:
    return course.body.causal and bool(course.body.part("masked"))


def token_model(course: Course) -> bool:
    return course.task != "digits"


def weights_of(part: Parts) -> list[Tensor]:
    """All weights of a block, each once."""
    modules = (part.attention, part.ffn, part.out, part.up, part.down, *part.norms)
    found = {id(w): w for module in modules for w in module.parameters()}
    return list(found.values())


def dead_units(course: Course, share: float = 0.9) -> None:
    """A bias that no input of the unit overcomes; without biases, a unit whose gate is 0."""
    up = block(course).up
    count = int(share * up.weight.shape[0])
    fill(
        up.weight[:count] if up.bias is None else up.bias[:count],
        0.0 if up.bias is None else -100.0,
    )


def draw_block(course: Course, blocks: range = range(BLOCK, BLOCK + 1)) -> None:
    for k in blocks:
        part = block(course, k)
        for linear in (part.out, part.up, part.down):
            redraw(linear)
        for view in (part.q, part.k, part.v):
            with torch.no_grad():
                view[0].normal_(0.0, view[0].shape[-1] ** -0.5)
        for norm in part.norms:
            fill(norm.weight, 1.0)


def no_mask(course: Course) -> None:
    course.body.set_causal(False)


def one_head(course: Course, factor: float) -> None:
    part = block(course)
    for view in (part.q, part.k, part.v):
        times([each[: len(each) // 4] for each in view], factor)


def set_eps(course: Course) -> None:
    for norm in block(course).norms:
        name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
        setattr(norm, name, 1e3)


def permuted(course: Course) -> None:
    embedding = course.body.part("embedding")
    with torch.no_grad():
        embedding.copy_(embedding.roll(3, 0))


def roll_places(course: Course) -> None:
    places = course.body.part("positions")
    with torch.no_grad():
        places.copy_(places.flip(-2))


def untie(course: Course) -> None:
    head = course.body.part("head")
    with torch.no_grad():
        head.normal_(0.0, float(head.std()))


def swap(course: Course, one: str, other: str, k: int = BLOCK) -> None:
    part = block(course, k)
    for a, b in zip(getattr(part, one), getattr(part, other), strict=True):
        with torch.no_grad():
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)


def transpose(course: Course) -> None:
    out = block(course).out.weight
    with torch.no_grad():
        out.copy_(out.T.clone())


class Act:
    """A hook of a module's output that a copy of the module keeps."""

    def __init__(self, act: Callable[[Tensor], Tensor]):
        self.act = act

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self.act(output[0]), *output[1:])
        return self.act(output)


def hook(course: Course, part: str, act: Callable[[Tensor], Tensor]) -> None:
    getattr(block(course), part).register_forward_hook(Act(act))


def constant(x: Tensor) -> Tensor:
    return x.detach()


def dropped(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.7)


def route_one(course: Course, factor: float = 1.0) -> None:
    """The router's rows except the first shrink, and its first row follows what all states
    share.
    """
    for part in course.body.blocks:
        with torch.no_grad():
            part.router.weight[1:] *= 0.0 if factor == 1 else factor


def massive(course: Course) -> None:
    """A channel of a sublayer's output that is 300 for all tokens."""
    fill(block(course).down.bias[:1], 300.0)


MODEL_FAULTS: dict[str, Fault] = {
    "scores 30 times too large": Fault(
        "attention scale", HERE, lambda c: times(block(c).q, 30), "scores by neighbours"
    ),
    "scores 30 times too small": Fault(
        "attention scale", HERE, lambda c: times(block(c).q, 1 / 30), "scores by neighbours"
    ),
    "scores too large everywhere": Fault(
        "attention scale",
        "",
        lambda c: [times(p.q, 30) for p in c.body.blocks] and None,
        "smaller scores",
    ),
    "90% dead units": Fault("dead part", HERE, dead_units, "redraw sublayer"),
    "all units dead": Fault("dead part", HERE, partial(dead_units, share=1.0), "redraw sublayer"),
    "attention output zero": Fault(
        "dead part", HERE, lambda c: fill(block(c).out.weight, 0.0), "redraw sublayer"
    ),
    "a head of zeros": Fault("dead part", HERE, partial(one_head, factor=0.0), "redraw sublayer"),
    "embeddings 50 times too large": Fault(
        "embedding",
        "embedding",
        lambda c: times([c.body.part("embedding")], 50),
        "smaller embedding",
    ),
    "embeddings 50 times too small": Fault(
        "embedding",
        "embedding",
        lambda c: times([c.body.part("embedding")], 0.02),
        "larger embedding",
    ),
    "positions 100 times too large": Fault(
        "positions",
        "embedding",
        lambda c: times([c.body.part("positions")], 100),
        "smaller positions",
        fits=has("positions"),
    ),
    "positions reversed": Fault("positions", "", roll_places, "restore", fits=has("positions")),
    "a block drawn anew": Fault("wrong weights", HERE, draw_block, "restore"),
    "a checkpoint half loaded": Fault(
        "wrong weights", "block", partial(draw_block, blocks=range(BLOCK, BLOCKS)), "restore"
    ),
    "no causal mask": Fault("future tokens", "", no_mask, "mask", fits=causal_switch, stands=True),
    "a weight that is nan": Fault(
        "not finite", HERE, lambda c: fill(block(c).down.weight[0, :1], math.nan), "restore"
    ),
    "a dead gain before the head": Fault(
        "gains", "norm", lambda c: fill(c.body.part("final_norm").weight[:1], 0.0), "median gains"
    ),
    "a norm's gains near zero": Fault(
        "gains", HERE, lambda c: fill(block(c).norms[0].weight, 1e-6), "unit gains"
    ),
    "a gain of 100": Fault(
        "gains", HERE, lambda c: fill(block(c).norms[1].weight[:1], 100.0), "median gains"
    ),
    "eps of 1000": Fault("norm", HERE, set_eps, "small eps", stands=True),
    "FFN output 50 times too large": Fault(
        "sublayer scale", HERE, lambda c: times([block(c).down.weight], 50), "scale by neighbours"
    ),
    "FFN output 1000 times too small": Fault(
        "sublayer scale",
        HERE,
        lambda c: times(filter(None.__ne__, (block(c).down.weight, block(c).down.bias)), 1e-3),
        "scale by neighbours",
    ),
    "attention output 50 times too large": Fault(
        "sublayer scale", HERE, lambda c: times([block(c).out.weight], 50), "scale by neighbours"
    ),
    "a massive channel": Fault(
        "outliers", HERE, massive, "restore", fits=lambda c: block(c).down.bias is not None
    ),
    "head 30 times too large": Fault(
        "logits", "head", lambda c: times([c.body.part("head")], 30), "smaller head"
    ),
    "token ids shifted": Fault("tokens", "", permuted, "restore", fits=lambda c: token_model(c)),
    "head drawn anew": Fault(
        "wrong weights", "head", untie, "restore", fits=lambda c: not c.body.part("tied")
    ),
    "queries and values swapped": Fault(
        "wrong weights", HERE, partial(swap, one="q", other="v"), "restore"
    ),
    "output map transposed": Fault("wrong weights", HERE, transpose, "restore"),
    "FFN output of the wrong sign": Fault(
        "wrong weights",
        HERE,
        lambda c: times(filter(None.__ne__, (block(c).down.weight, block(c).down.bias)), -1.0),
        "restore",
    ),
    "dropout in evaluation": Fault(
        "noise", HERE, partial(hook, part="out", act=dropped), "", stands=True
    ),
    "router collapsed": Fault(
        "routing", HERE, route_one, "redraw router", fits=lambda c: block(c).router is not None
    ),
}
"""Faults that are put into a healthy trained model, by name."""


# faults of a training


def from_event(change: Callable[[Course, Batch], Batch]) -> Put:
    """Data that are spoiled from step `EVENT` on."""

    def put(course: Course) -> None:
        course.data = lambda c, step, given: change(c, given) if step >= EVENT else given

    return put


def at_event(change: Callable[[Course, Batch], Batch]) -> Put:
    """One batch that is spoiled."""

    def put(course: Course) -> None:
        course.data = lambda c, step, given: change(c, given) if step == EVENT else given

    return put


def always(change: Callable[[Course, Batch], Batch]) -> Put:
    def put(course: Course) -> None:
        course.data = lambda c, step, given: change(c, given)

    return put


def repeated_token(c: Course, given: Batch) -> Batch:
    return torch.zeros_like(given[0]), torch.where(given[1] == -1, -1, 0)


def other_tokens(c: Course, given: Batch) -> Batch:
    limit = int(c.body.part("head").shape[0])
    return (given[0] + 3) % limit, torch.where(given[1] == -1, -1, (given[1] + 3) % limit)


def unshifted(c: Course, given: Batch) -> Batch:
    return given[0], torch.where(given[1] == -1, -1, given[0])


def shuffled(c: Course, given: Batch) -> Batch:
    return given[0], given[1].roll(1, 0)


def same_batch(c: Course, given: Batch) -> Batch:
    from benchmarks.clinic.course import batch

    return batch(c.task, c.body, 0, c.seed)


def nan_at_event(course: Course) -> None:
    course.loss = lambda c, step, logits, targets: (
        cross_entropy(logits, targets) * (math.nan if step == EVENT else 1.0)
    )


def twice_softmax(course: Course) -> None:
    course.loss = lambda c, step, logits, targets: cross_entropy(logits.softmax(-1), targets)


def grow(weights: Callable[[Course], Any], factor: float) -> Put:
    """Weights that grow by a factor at each step after 60."""

    def put(course: Course) -> None:
        course.after = lambda c, step: times(weights(c), factor) if step >= 60 else None

    return put


def at(step_of: int, act: Callable[[Course], None]) -> Put:
    """Something that happens once, after a step."""

    def put(course: Course) -> None:
        course.after = lambda c, step: act(c) if step == step_of else None

    return put


def set_fields(**fields: Any) -> Put:
    def put(course: Course) -> None:
        for name, value in fields.items():
            setattr(course, name, value)

    return put


def optimiser(**options: Any) -> Put:
    return lambda course: course.make_optimiser(**options)


def freeze(course: Course) -> None:
    part = block(course)
    for module in (part.out, part.up, part.down):
        for weight in module.parameters():
            weight.requires_grad_(requires_grad=False)


def left_out(course: Course) -> None:
    part = block(course)
    course.make_optimiser(
        without=[w for module in (part.up, part.down) for w in module.parameters()]
    )


def fast_embedding(course: Course) -> None:
    course.embedding_factor = 300.0
    course.make_optimiser()


def decay_gains(course: Course) -> None:
    """A decay that takes half of each gain in 100 steps."""
    course.make_optimiser(gain_decay=math.log(2) / (100 * course.rate))


def fewer_experts(course: Course) -> None:
    course.after = lambda c, step: route_one(c, 0.95)


def lost_moments(course: Course) -> None:
    """A resumption without the optimiser's moments, at ten times the rate."""
    course.rate *= 10
    course.make_optimiser()


TRAINING_FAULTS: dict[str, Fault] = {
    "rate 100 times too large": Fault("rate", "", set_fields(rate=0.3), "lower rate"),
    "rate 10 times, no warm-up": Fault("rate", "", set_fields(rate=0.03, warm_up=0), "lower rate"),
    "rate ends too early": Fault(
        "stalled", "", set_fields(ends_at=EVENT), "steps as planned", start=EVENT
    ),
    "Adam's eps of 1": Fault("stalled", "", optimiser(eps=1.0), "steps as planned"),
    "loss scaled down to 1e-9": Fault("stalled", "", set_fields(scale=1e-9), "steps as planned"),
    "betas of .9 and .9999": Fault("moments", "", optimiser(betas=(0.9, 0.9999)), "usual betas"),
    "moments lost on resumption": Fault(
        "rate", "", at(EVENT, lost_moments), "lower rate", start=EVENT
    ),
    "weight decay on gains": Fault("gains", "", decay_gains, "gains without decay", gradual=True),
    "labels not shifted": Fault("leak", "", always(unshifted), "own data", fits=token_model),
    "no causal mask": Fault("leak", "", no_mask, "mask", fits=causal_switch),
    "labels shuffled": Fault("labels", "", always(shuffled), "own data"),
    "labels shuffled half-way": Fault("labels", "", from_event(shuffled), "own data", start=EVENT),
    "another tokenizer half-way": Fault(
        "labels", "", from_event(other_tokens), "own data", start=EVENT, fits=token_model
    ),
    "a batch of one token": Fault(
        "bad batch", "", at_event(repeated_token), "back and skip", start=EVENT, fits=token_model
    ),
    "a batch of another tokenizer": Fault(
        "bad batch", "", at_event(other_tokens), "back and skip", start=EVENT, fits=token_model
    ),
    "nan in one batch": Fault("not finite", "", nan_at_event, "back and skip", start=EVENT),
    "the same batch for ever": Fault("repeats", "", always(same_batch), "own data"),
    "frozen maps of a block": Fault("frozen", HERE, freeze, "train all"),
    "an FFN the optimiser lacks": Fault("frozen", HERE, left_out, "train all"),
    "gradients never reset": Fault(
        "stale gradients", "", set_fields(zero_every=10**9), "reset gradients"
    ),
    "accumulation not divided": Fault(
        "stale gradients", "", set_fields(micro=4, clip=1e9), "divide gradients"
    ),
    "softmax twice": Fault("loss", "", twice_softmax, "plain loss"),
    "queries that grow": Fault(
        "attention scale",
        HERE,
        grow(lambda c: block(c).q, 1.06),
        "lower rate",
        start=60,
        gradual=True,
    ),
    "a last map that grows": Fault(
        "sublayer scale",
        HERE,
        grow(lambda c: [block(c).down.weight], 1.05),
        "lower rate",
        start=60,
        gradual=True,
    ),
    "an embedding that runs away": Fault(
        "embedding", "", fast_embedding, "slow embedding", gradual=True
    ),
    "an FFN that dies": Fault(
        "dead part", HERE, at(EVENT, partial(dead_units, share=1.0)), "redraw sublayer", start=EVENT
    ),
    "a path cut by detach": Fault("dead part", HERE, partial(hook, part="out", act=constant), ""),
    "a router that collapses": Fault(
        "routing",
        "",
        fewer_experts,
        "redraw router",
        gradual=True,
        fits=lambda c: block(c).router is not None,
    ),
}
"""Faults that are put into a training, by name."""
