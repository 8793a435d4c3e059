"""Faults that happen when models are ported and loaded, planted into a model of `edit_models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.edit_models import CONTEXT, GROUPS, WIDTH, Anatomy, RotaryGPT

Fault = Callable[[Any, Anatomy], object]
NOT_HERE = "this model has no such part"


def at(block: nn.Module, path: str) -> Tensor:
    """A weight of a block."""
    return block.get_parameter(path)


def third(block: nn.Module, body: Anatomy, number: int) -> Tensor:
    """Queries, keys or values: a weight, or a third of the joined one."""
    if not body.joined:
        return at(block, (body.queries, body.keys, body.values)[number])
    weight = at(block, body.queries)
    axis = 0 if weight.shape[0] == 3 * WIDTH else 1
    return weight.narrow(axis, number * WIDTH, WIDTH)


def exchange(one: Tensor, other: Tensor) -> None:
    if one.shape != other.shape:
        raise LookupError(NOT_HERE)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def thirds_exchanged(one: int, other: int, blocks: slice) -> Fault:
    def fault(model: Any, body: Anatomy) -> None:
        for block in body.blocks(model)[blocks]:
            exchange(third(block, body, one), third(block, body, other))

    return fault


def transposed(path: str, blocks: slice) -> Fault:
    def fault(model: Any, body: Anatomy) -> None:
        for block in body.blocks(model)[blocks]:
            weight = at(block, getattr(body, path))
            if weight.shape[0] != weight.shape[1]:
                raise LookupError(NOT_HERE)
            weight.copy_(weight.T.clone())

    return fault


def scaled(path: str, factor: float, blocks: slice) -> Fault:
    def fault(model: Any, body: Anatomy) -> None:
        for block in body.blocks(model)[blocks]:
            at(block, getattr(body, path)).mul_(factor)

    return fault


def of(name: str) -> Callable[[Any, Anatomy], Tensor]:
    """The embedding, positions or head of a model."""

    def find(model: Any, body: Anatomy) -> Tensor:
        part = getattr(body, name)
        if part is None:
            raise LookupError(NOT_HERE)
        return part(model)

    return find


def rows(name: str, act: Callable[[Tensor], Tensor]) -> Fault:
    def fault(model: Any, body: Anatomy) -> None:
        weight = of(name)(model, body)
        weight.copy_(act(weight).clone())

    return fault


def blocks_exchanged(model: Any, body: Anatomy) -> None:
    blocks = body.blocks(model)
    for one, other in zip(blocks[1].parameters(), blocks[2].parameters(), strict=True):
        exchange(one, other)


def blocks_reversed(model: Any, body: Anatomy) -> None:
    blocks = [list(block.parameters()) for block in body.blocks(model)]
    for i in range(len(blocks) // 2):
        for one, other in zip(blocks[i], blocks[-1 - i], strict=True):
            exchange(one, other)


def gains_less_one(model: Any, body: Anatomy) -> None:
    for block in body.blocks(model):
        at(block, body.gains).sub_(1)


def gate_and_up(model: Any, body: Anatomy) -> None:
    if not body.gate:
        raise LookupError(NOT_HERE)
    for block in body.blocks(model):
        exchange(at(block, body.gate), at(block, body.up))


def key_heads(act: Callable[[Tensor], Tensor]) -> Fault:
    def fault(model: Any, body: Anatomy) -> None:
        if body.joined:
            raise LookupError(NOT_HERE)
        for block in body.blocks(model):
            for path in (body.keys, body.values):
                weight = at(block, path)
                weight.copy_(act(weight.view(GROUPS, -1, WIDTH)).reshape(weight.shape).clone())

    return fault


def flag(name: str, *, value: object) -> Fault:
    def fault(model: Any, body: Anatomy) -> None:
        if not isinstance(model, RotaryGPT):
            raise LookupError(NOT_HERE)
        for layer in model.layers:
            setattr(layer.attn, name, value)

    return fault


def no_scale(model: Any, body: Anatomy) -> None:
    for block in body.blocks(model):
        if isinstance(model, RotaryGPT):
            block.attn.scaled = False
        elif body.joined:
            third(block, body, 0).mul_(4)
        else:
            block.self_attn.scaling = 1.0


def no_mask(model: Any, body: Anatomy) -> None:
    for block in body.blocks(model):
        if isinstance(model, RotaryGPT):
            block.attn.causal = False
        elif hasattr(block, "causal"):
            block.causal = False
        else:
            raise LookupError(NOT_HERE)


def other_base(model: Any, body: Anatomy) -> None:
    if isinstance(model, RotaryGPT):
        flag("base", value=10.0)(model, body)
    elif hasattr(model, "model") and hasattr(model.model, "rotary_emb"):
        frequencies = model.model.rotary_emb.inv_freq
        steps = torch.arange(len(frequencies)) / len(frequencies)
        model.model.rotary_emb.inv_freq = 10.0**-steps
    else:
        raise LookupError(NOT_HERE)


def other_halves(model: Any, body: Anatomy) -> None:
    if isinstance(model, RotaryGPT):
        flag("pairs", value=False)(model, body)
    elif body.joined:
        raise LookupError(NOT_HERE)
    else:
        for block in body.blocks(model):
            for path in (body.queries, body.keys):
                weight = at(block, path)
                turned = weight.view(-1, 2, 4, WIDTH).transpose(1, 2)
                weight.copy_(turned.reshape(weight.shape).clone())


EVERY, ONE, FIRST = slice(None), slice(1, 2), slice(0, 1)
FAULTS: dict[str, Fault] = {
    "queries and keys exchanged": thirds_exchanged(0, 1, EVERY),
    "keys and values exchanged": thirds_exchanged(1, 2, EVERY),
    "keys and values of a block exchanged": thirds_exchanged(1, 2, ONE),
    "queries and values of a block exchanged": thirds_exchanged(0, 2, ONE),
    "output maps transposed": transposed("output", EVERY),
    "output map of a block transposed": transposed("output", ONE),
    "query map of a block transposed": transposed("queries", ONE),
    "sign of an FFN's last map": scaled("down", -1.0, FIRST),
    "FFN's last maps 30 times too small": scaled("down", 1 / 30, EVERY),
    "output map of a block 20 times too large": scaled("output", 20.0, ONE),
    "output map of a block 0": scaled("output", 0.0, ONE),
    "gate and up exchanged": gate_and_up,
    "gains less 1": gains_less_one,
    "blocks exchanged": blocks_exchanged,
    "blocks in reverse order": blocks_reversed,
    "embedding 8 times too large": rows("embedding", lambda w: w * 8),
    "token ids shifted": rows("embedding", lambda w: w.roll(3, 0)),
    "head 8 times too small": rows("head", lambda w: w / 8),
    "head drawn anew": rows("head", lambda w: 0.02 * torch.randn(w.shape)),
    "positions in reverse order": rows(
        "positions", lambda w: torch.cat([w[:CONTEXT].flip(0), w[CONTEXT:]])
    ),
    "positions moved by two": rows("positions", lambda w: w.roll(2, 0)),
    "no 1/sqrt(d)": no_scale,
    "no mask": no_mask,
    "rotary base 10": other_base,
    "rotary halves for pairs": other_halves,
    "heads share other keys": flag("neighbours", value=False),
    "key heads in reverse order": key_heads(lambda w: w.flip(0)),
    "key heads rolled": key_heads(lambda w: w.roll(1, 0)),
}
"""A fault raises LookupError for a model without such a part."""
