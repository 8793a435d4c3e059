"""The faults of trained models that the second trial adds: of ports, loads and pipelines.

Drawn from public threads, such as Blaizzy/mlx-vlm#2041 (gains less 1), WestWaters/pollard-weights#70
and nurl-lang/nurl#584 (halves for pairs), charlie12345/ROCmFPX#49 (gate and up), tied heads in
huggingface/transformers#42612, left padding in ndif-team/nnsight#672, softmax over the queries in
labmlai/annotated_deep_learning_paper_implementations#146.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.clinic.architectures import make
from benchmarks.clinic.bodies import BLOCKS, HEADS, WIDTH, Parts
from benchmarks.clinic.course import Batch, Course
from benchmarks.clinic.faults import (
    HERE,
    Act,
    Fault,
    block,
    causal_switch,
    dropped,
    fill,
    has,
    swap,
    times,
    weights_of,
)

SIZE = WIDTH // HEADS
LAST = BLOCKS - 1
PADDED = 8
"""Tokens of padding before each text."""


def everywhere(act: Callable[[Parts], object]) -> Callable[[Course], None]:
    def put(course: Course) -> None:
        with torch.no_grad():
            for part in course.body.blocks:
                act(part)

    return put


def by_heads(view: Tensor, heads: int) -> Tensor:
    """A weight or a bias of queries or keys as (heads, channels, ..), without a copy."""
    already_split = view.dim() == 3 or view.shape == (HEADS, SIZE)
    return view if already_split else view.unflatten(0, (heads, -1))


def other_base(course: Course) -> None:
    with torch.no_grad():
        for each in course.body.part("rotary"):
            count = len(each.inv_freq)
            each.inv_freq.copy_(10.0 ** (-torch.arange(count) / count))


def halves_for_pairs(course: Course) -> None:
    with torch.no_grad():
        for part in course.body.blocks:
            for views, heads in ((part.q, HEADS), (part.k, part.groups or HEADS)):
                for view in views:
                    own = by_heads(view, heads)
                    paired = own.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
                    own.copy_(paired.clone())


def unscaled(course: Course) -> None:
    for owner, name in course.body.part("scaled"):
        setattr(owner, name, 1.0)


def rolled_keys(part: Parts) -> None:
    for views in (part.k, part.v):
        for view in views:
            own = by_heads(view, part.groups)
            own.copy_(own.roll(1, 0).clone())


def misread_thirds(course: Course) -> None:
    """Rows by head and then by role, read as by role and then by head; or the other way round."""
    by_head_first = course.body.part("by head")
    shape = (HEADS, 3) if by_head_first else (3, HEADS)
    with torch.no_grad():
        for linear in course.body.part("fused"):
            for weight in (linear.weight, linear.bias):
                if weight is not None:
                    rows = weight.unflatten(0, (*shape, SIZE))
                    weight.copy_(rows.transpose(0, 1).flatten(0, 2).clone())


def gains_less_one(part: Parts) -> None:
    for norm in part.norms:
        norm.weight.sub_(1.0)


def blocks_exchanged(course: Course) -> None:
    first, second = (weights_of(block(course, k)) for k in (1, 2))
    with torch.no_grad():
        for a, b in zip(first, second, strict=True):
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)


def equal_shapes(course: Course) -> bool:
    shapes = [[each.shape for each in weights_of(block(course, k))] for k in (1, 2)]
    return shapes[0] == shapes[1]


def fresh(course: Course) -> Any:
    """The same architecture before any training, drawn with another seed."""
    return make(course.architecture, course.task, course.seed + 70)


def block_not_loaded(course: Course) -> None:
    drawn = weights_of(fresh(course).blocks[LAST])
    with torch.no_grad():
        for weight, other in zip(weights_of(block(course, LAST)), drawn, strict=True):
            weight.copy_(other)


def embedding_not_loaded(course: Course) -> None:
    with torch.no_grad():
        course.body.part("embedding").copy_(fresh(course).part("embedding"))


def tied_head_drawn(course: Course) -> None:
    owner = course.body.part("head owner")
    weight = owner.weight
    owner.weight = nn.Parameter(torch.randn(weight.shape) * 0.02)


def unit_norms(course: Course) -> None:
    norms = [norm for part in course.body.blocks for norm in part.norms]
    for norm in [*norms, course.body.part("final_norm")]:
        fill(norm.weight, 1.0)
        if getattr(norm, "bias", None) is not None:
            fill(norm.bias, 0.0)


def no_final_norm(course: Course) -> None:
    owner, name = course.body.part("final norm owner")
    setattr(owner, name, nn.Identity())


def eps_of_one(course: Course) -> None:
    for part in course.body.blocks:
        for norm in part.norms:
            setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 1.0)


def pipeline(change: Callable[[Batch], Batch]) -> Callable[[Course], None]:
    def put(course: Course) -> None:
        course.pipeline = change

    return put


def flipped(given: Batch) -> Batch:
    return given[0].flip(-1), given[1]


def normalised_twice(given: Batch) -> Batch:
    return (given[0] - 0.5) / 0.5, given[1]


def padded_left(given: Batch) -> Batch:
    tokens, targets = given
    padding = torch.zeros_like(tokens[:, :PADDED])
    ignored = torch.full_like(targets[:, :PADDED], -1)
    return (
        torch.cat([padding, tokens[:, :-PADDED]], 1),
        torch.cat([ignored, targets[:, :-PADDED]], 1),
    )


def gate_and_up(part: Parts) -> None:
    gate, up = (linear.weight for linear in part.gate)
    kept = gate.clone()
    gate.copy_(up)
    up.copy_(kept)


def other_activation(course: Course) -> None:
    for owner, name, value in course.body.part("activations"):
        setattr(owner, name, value)


def residual_constants(course: Course) -> None:
    own, of_the_embedding = course.body.part("residual")
    fill(own, 1.0)
    fill(of_the_embedding, 0.0)


def positions_by_two(course: Course) -> None:
    places = course.body.part("positions")
    with torch.no_grad():
        places.copy_(places.roll(2, -2).clone())


def reversed_slopes(course: Course) -> None:
    for slopes in course.body.part("slopes"):
        slopes.copy_(slopes.flip(0).clone())


def set_in_attention(name: str, value: object) -> Callable[[Course], None]:
    def put(course: Course) -> None:
        for each in course.body.part("masked"):
            setattr(each, name, value)

    return put


def transposed(part: Parts) -> None:
    part.out.weight.copy_(part.out.weight.T.clone())


def keys_and_values(course: Course) -> None:
    for k in range(BLOCKS):
        swap(course, "k", "v", k)


def rolled_head(course: Course) -> None:
    head = course.body.part("head")
    with torch.no_grad():
        head.copy_(head.roll(1, 0).clone())


def three_bits(part: Parts) -> None:
    for weight in weights_of(part):
        if weight.dim() > 1:
            unit = weight.abs().max() / 3
            weight.copy_((weight / unit).round() * unit)


def columns_lost(course: Course) -> None:
    weight = block(course).down.weight
    fill(weight[:, weight.shape[1] // 2 :], 0.0)


def shards_exchanged(course: Course) -> None:
    weight = block(course).down.weight
    with torch.no_grad():
        weight.copy_(weight.roll(weight.shape[1] // 2, 1).clone())


def dropout_everywhere(course: Course) -> None:
    for part in course.body.blocks:
        for linear in (part.out, part.down):
            linear.register_forward_hook(Act(dropped))


def map_loaded_twice(course: Course) -> None:
    with torch.no_grad():
        for name in ("up", "down"):
            own, other = (getattr(block(course, k), name).weight for k in (1, 2))
            own.copy_(other)


def without(name: str) -> Callable[[Course], bool]:
    return lambda course: course.body.part(name) is None


def token_text(course: Course) -> bool:
    return course.task == "text" and course.body.causal


def images(course: Course) -> bool:
    return course.task == "digits"


def gated(course: Course) -> bool:
    return block(course).gate is not None


def grouped(course: Course) -> bool:
    return block(course).groups > 0


def normed(course: Course) -> bool:
    return bool(block(course).norms)


def untied(course: Course) -> bool:
    return not course.body.part("tied")


def with_heads_ahead(course: Course) -> bool:
    return causal_switch(course) and hasattr(course.body.part("masked")[0], "ahead")


ADDED: dict[str, Fault] = {
    "rotary base 10": Fault(
        "positions", "", other_base, "", fits=has("rotary"), stands=True, undone_by_search=True
    ),
    "rotary halves for pairs": Fault(
        "positions", "", halves_for_pairs, "restore", fits=has("rotary"), undone_by_search=True
    ),
    "no 1/sqrt(d)": Fault(
        "attention scale", "", unscaled, "", fits=has("scaled"), stands=True, undone_by_search=True
    ),
    "heads of keys in another order": Fault(
        "wrong weights", "", everywhere(rolled_keys), "restore", fits=grouped, undone_by_search=True
    ),
    "rows of queries, keys and values misread": Fault(
        "wrong weights", "", misread_thirds, "restore", fits=has("fused")
    ),
    "gains less 1": Fault(
        "gains", "", everywhere(gains_less_one), "restore", fits=normed, undone_by_search=True
    ),
    "blocks exchanged": Fault(
        "wrong weights",
        "block",
        blocks_exchanged,
        "restore",
        fits=equal_shapes,
        undone_by_search=True,
    ),
    "a block not in the checkpoint": Fault(
        "block not loaded", f"block {LAST}", block_not_loaded, "restore", undone_by_search=True
    ),
    "embedding not in the checkpoint": Fault("end not loaded", "", embedding_not_loaded, "restore"),
    "head of a tied model drawn": Fault(
        "end not loaded",
        "",
        tied_head_drawn,
        "restore",
        fits=has("head owner"),
        undone_by_search=True,
    ),
    "all norms at 1": Fault(
        "gains", "", unit_norms, "restore", fits=lambda c: normed(c) and has("final_norm")(c)
    ),
    "no final norm": Fault(
        "missing part", "", no_final_norm, "", fits=has("final norm owner"), stands=True
    ),
    "eps of 1": Fault("norm", "", eps_of_one, "small eps", fits=normed, stands=True),
    "images flipped": Fault("data", "", pipeline(flipped), "own data", fits=images),
    "images normalised twice": Fault(
        "data", "", pipeline(normalised_twice), "own data", fits=images
    ),
    "texts padded on the left": Fault(
        "padding", "", pipeline(padded_left), "own data", fits=token_text
    ),
    "gate and up exchanged": Fault(
        "wrong weights", "", everywhere(gate_and_up), "restore", fits=gated, undone_by_search=True
    ),
    "another activation": Fault(
        "code", "", other_activation, "", fits=has("activations"), stands=True
    ),
    "residual constants lost": Fault(
        "code", "", residual_constants, "restore", fits=has("residual")
    ),
    "positions off by two": Fault(
        "positions", "", positions_by_two, "restore", fits=has("positions"), undone_by_search=True
    ),
    "slopes of heads reversed": Fault(
        "positions", "", reversed_slopes, "", fits=has("slopes"), stands=True
    ),
    "mask one token late": Fault(
        "future tokens",
        "",
        set_in_attention("ahead", 1),
        "mask",
        fits=with_heads_ahead,
        stands=True,
        wrong_by_definition=True,
    ),
    "softmax over the queries": Fault(
        "softmax axis",
        "",
        set_in_attention("softmax_axis", -2),
        "",
        fits=with_heads_ahead,
        stands=True,
    ),
    "output maps transposed": Fault(
        "wrong weights", "", everywhere(transposed), "restore", undone_by_search=True
    ),
    "keys and values exchanged": Fault(
        "wrong weights", "", keys_and_values, "restore", undone_by_search=True
    ),
    "rows of the head rolled": Fault(
        "tokens", "", rolled_head, "restore", fits=untied, undone_by_search=True
    ),
    "embedding times sqrt(width)": Fault(
        "embedding",
        "",
        lambda c: times([c.body.part("embedding")], WIDTH**0.5),
        "smaller embedding",
        fits=untied,
        undone_by_search=True,
    ),
    "blocks in 3 bits": Fault("precision", "", everywhere(three_bits), "restore"),
    "half of an FFN's columns lost": Fault("dead part", HERE, columns_lost, "restore"),
    "shards of an FFN exchanged": Fault("wrong weights", HERE, shards_exchanged, "restore"),
    "dropout in evaluation, everywhere": Fault(
        "noise", "", dropout_everywhere, "no hooks", stands=True
    ),
    "an FFN loaded into two blocks": Fault("copies", "block", map_loaded_twice, "restore"),
}
"""By name. None of them was in the first trial."""
