"""Treatments of a training or a model, as code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.clinic.bodies import Parts, redraw
from benchmarks.clinic.case import Case, Treatment
from benchmarks.clinic.course import Course, cross_entropy
from benchmarks.clinic.loop_treatments import (
    divide_gradients,
    float32,
    higher_rate,
    ignore_padding,
    lower_rate,
    optimiser,
    own_data,
    plain_loss,
    reset_gradients,
    slow_embedding,
    steps_as_planned,
    train_all,
    train_all_as_usual,
    usual_betas,
    usual_eps_and_scale,
    warm_up,
    whole_loop_as_usual,
)

MOVED = 0.01
"""The share of its length by which a step should move a sublayer's weights."""


def _size(tensors: Sequence[Tensor]) -> float:
    return float(tensors[0].detach().square().mean().sqrt())


@torch.no_grad()
def _scale(tensors: Sequence[Tensor | None], factor: float) -> None:
    for each in tensors:
        if each is not None:
            each.mul_(factor)


def _beside(case: Case, k: int, read: Callable[[Parts], float]) -> float:
    """The median of a size over the other blocks."""
    others = sorted(read(part) for n, part in enumerate(case.course.body.blocks) if n != k)
    return others[len(others) // 2]


def _maps(part: Parts, *, attention: bool) -> list[Any]:
    return [part.out] if attention else [part.down]


def redraw_sublayer(case: Case) -> None:
    for part in case.parts:
        if case.of_attention:
            redraw(part.out)
            for view in (part.q, part.k, part.v):
                with torch.no_grad():
                    view[0].normal_(0.0, view[0].shape[-1] ** -0.5)
        else:
            redraw(part.up)
            redraw(part.down)


def redraw_router(case: Case) -> None:
    for part in case.parts:
        if part.router is not None:
            redraw(part.router)
    case.course.after = None  # what pulls the router is taken away, as a balancing bias does


def revive(case: Case) -> None:
    """Gains near 0 become 1, matrices of zeros and units that are always off are drawn again, and
    hooks that cut a path are removed.
    """
    unit_gains(case)
    redraw_zeros(case)
    redraw_units(case)
    no_hooks(case)


@torch.no_grad()
def redraw_zeros(case: Case) -> None:
    """Rows of zeros among queries, keys, values and first maps are drawn again; last maps too, if
    what they read is 0 as well.
    """
    for part in case.parts:
        for last, views in (
            (part.out, (part.q[0], part.k[0], part.v[0])),
            (part.down, (part.up.weight,)),
        ):
            drawn = False
            for view in views:
                zero = view.abs().sum(-1) == 0
                view[zero] = torch.randn_like(view[zero]) * view.shape[-1] ** -0.5
                drawn = drawn or bool(zero.all())
            if drawn and not float(last.weight.abs().max()):
                redraw(last)


@torch.no_grad()
def redraw_units(case: Case) -> None:
    """Units that are the same for all tokens get fresh input weights and output weights of 0; what
    they added becomes an offset.
    """
    read, _ = case.course.held_out()
    for part in case.parts:
        seen: list[Tensor] = []
        handle = part.down.register_forward_pre_hook(
            lambda module, given, seen=seen: seen.append(given[0].detach())
        )
        case.course.body.logits(read[:16])
        handle.remove()
        if not seen:
            continue
        features = seen[0].flatten(0, -2)
        dead = (features.amax(0) - features.amin(0)) <= 1e-6 * features.abs().amax()
        if part.down.bias is not None:
            part.down.bias += part.down.weight[:, dead] @ features[0, dead]
        part.down.weight[:, dead] = 0.0
        part.up.weight[dead] = (
            torch.randn_like(part.up.weight[dead]) * part.up.weight.shape[-1] ** -0.5
        )
        if part.up.bias is not None:
            part.up.bias[dead] = 0.0


def prune(case: Case) -> None:
    """The blocks add nothing."""
    for part in case.parts:
        _scale([part.out.weight, part.out.bias, part.down.weight, part.down.bias], 0.0)


@torch.no_grad()
def median_gains(case: Case) -> None:
    """Gains far from their norm's median get the median."""
    norms = [norm for part in case.parts for norm in part.norms] + [
        case.course.body.part("final_norm")
    ]
    for norm in norms:
        weight = getattr(norm, "weight", None)
        if weight is not None:
            middle = weight.abs().median()
            odd = (weight.abs() < 1e-3 * middle) | (weight.abs() > 20 * middle)
            weight[odd] = middle


@torch.no_grad()
def unit_gains(case: Case) -> None:
    for norm in (norm for part in case.parts for norm in part.norms):
        if float(norm.weight.abs().max()) < 0.1:
            norm.weight.fill_(1.0)


def small_eps(case: Case) -> None:
    for norm in (norm for part in case.parts for norm in part.norms):
        setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 1e-5)


def _to_size(name: str, size: float) -> Treatment:
    def treat(case: Case) -> None:
        weight = case.course.body.part(name)
        if weight is not None:
            _scale([weight], size / max(1e-12, _size([weight])))

    return treat


def smaller_embedding(case: Case) -> None:
    """What the blocks add becomes four times as large as the embedding. The finding's value is ten
    times what they add, over the state.
    """
    if case.finding is None or not case.finding.check:
        _to_size("embedding", 0.3)(case)
    else:
        _scale([case.course.body.part("embedding")], min(1.0, case.finding.value / 40))


def smaller_positions(case: Case) -> None:
    places, words = case.course.body.part("positions"), case.course.body.part("embedding")
    if places is not None:
        _scale([places], _size([words]) / max(1e-12, _size([places])))


def scores_by_neighbours(case: Case) -> None:
    """Queries and keys get the size of those in the blocks beside, or a tenth if all blocks are
    named.
    """
    for k in case.blocks:
        part = case.course.body.blocks[k]
        for view, read in ((part.q, lambda p: _size(p.q)), (part.k, lambda p: _size(p.k))):
            wanted = _beside(case, k, read)
            _scale(
                view,
                (
                    wanted / max(1e-12, _size(view))
                    if len(case.blocks) < len(case.course.body.blocks)
                    else 0.3
                ),
            )


def _hold(case: Case, pick: Callable[[Parts], list[Tensor]]) -> None:
    """Weights get their size in the earlier copy, now and after each later step at which they are
    larger.
    """
    if case.earlier is None:
        return
    sizes = [[_size([w]) for w in pick(part)] for part in case.earlier.body.blocks]
    before = case.course.after

    def after(course: Course, step: int) -> None:
        if before is not None:
            before(course, step)
        for part, most in zip(course.body.blocks, sizes, strict=True):
            for weight, size in zip(pick(part), most, strict=True):
                _scale([weight], min(1.0, size / max(1e-12, _size([weight]))))

    after(case.course, case.course.step)
    case.course.after = after


def hold_scores(case: Case) -> None:
    _hold(case, lambda part: [part.q[0], part.k[0]])


def hold_maps(case: Case) -> None:
    _hold(case, lambda part: [part.out.weight, part.down.weight])


def bounded_gains(case: Case) -> None:
    """A norm's gains have a root mean square of at most 10."""
    for norm in (norm for part in case.parts for norm in part.norms):
        _scale([norm.weight], min(1.0, 10 / max(1e-12, _size([norm.weight]))))


def scale_by_neighbours(case: Case) -> None:
    for k in case.blocks:
        for linear in _maps(case.course.body.blocks[k], attention=case.of_attention):
            wanted = _beside(
                case, k, lambda p: _size([_maps(p, attention=case.of_attention)[0].weight])
            )
            _scale([linear.weight], wanted / max(1e-12, _size([linear.weight])))


def smaller_steps(case: Case) -> None:
    for part in case.parts:
        _scale([part.out.weight, part.down.weight], 0.3)


def smaller_head(case: Case) -> None:
    head = case.course.body.part("head")
    _scale([head], head.shape[-1] ** -0.5 / max(1e-12, _size([head])))


def smaller_head_if_guessing(case: Case) -> None:
    """A loss above guessing: a smaller head; else the z-loss."""
    head = case.course.body.part("head")
    (smaller_head if case.course.evaluate() > math.log(head.shape[0]) else z_loss)(case)


def mask(case: Case) -> None:
    case.course.body.set_causal(True)


def restore(case: Case) -> None:
    """The weights of the earlier copy."""
    if case.earlier is not None:
        kept = {name: each.clone() for name, each in case.earlier.body.model.state_dict().items()}
        case.course.body.model.load_state_dict(kept)


@torch.no_grad()
def restore_ends(case: Case) -> None:
    """Embedding and head of the earlier copy, and the task's own tokens and targets."""
    own_data(case)
    for name in ("embedding", "head") if case.earlier is not None else ():
        case.course.body.part(name).copy_(case.earlier.body.part(name))


@torch.no_grad()
def restore_queries(case: Case) -> None:
    """Queries and keys of the earlier copy."""
    for part, old in zip(
        case.course.body.blocks, case.earlier.body.blocks if case.earlier else (), strict=False
    ):
        for now, before in ((part.q, old.q), (part.k, old.k)):
            for weight, kept in zip(now, before, strict=True):
                weight.copy_(kept)


def back_and_skip(case: Case) -> None:
    """Weights and moments of the earlier copy; the batches since then are not read again."""
    restore(case)
    if case.earlier is not None:
        case.course.optimiser.load_state_dict(case.earlier.optimiser.state_dict())


def back_and_slower(case: Case) -> None:
    """Back, and a rate at which the median sublayer moves by `MOVED` of its length at the end of
    the warm-up.
    """
    value = 1.0 if case.finding is None else case.finding.value
    full = value * case.course.rate / max(1e-12, case.course.rate_at(case.course.step - 1))
    back_and_skip(case)
    case.course.rate *= min(1.0, MOVED / full)


def back_and_own_data(case: Case) -> None:
    back_and_skip(case)
    own_data(case)


def own_data_and_scale(case: Case) -> None:
    """What makes gradients small is looked for: targets that leak, data that repeat, and the loss's
    scale.
    """
    own_data_and_mask(case)
    case.course.scale = 1.0


def gains_without_decay(case: Case) -> None:
    optimiser(case)
    unit_gains(case)


def back_and_slow_embedding(case: Case) -> None:
    back_and_skip(case)
    slow_embedding(case)


def own_data_and_mask(case: Case) -> None:
    own_data(case)
    mask(case)


def no_hooks(case: Case) -> None:
    """Hooks that change what a module returns are removed."""
    for module in case.course.body.model.modules():
        module._forward_hooks.clear()


def z_loss(case: Case) -> None:
    case.course.loss = lambda c, step, logits, targets: (
        cross_entropy(logits, targets) + 1e-3 * logits.logsumexp(-1).square().mean()
    )


def nothing(case: Case) -> None:
    """The advice asks for no change."""


TREATMENTS: dict[str, Treatment] = {
    "nothing": nothing,
    "redraw sublayer": redraw_sublayer,
    "revive": revive,
    "redraw zeros": redraw_zeros,
    "redraw units": redraw_units,
    "prune": prune,
    "redraw router": redraw_router,
    "median gains": median_gains,
    "unit gains": unit_gains,
    "small eps": small_eps,
    "smaller embedding": smaller_embedding,
    "larger embedding": _to_size("embedding", 0.3),
    "smaller positions": smaller_positions,
    "smaller scores": scores_by_neighbours,
    "scores by neighbours": scores_by_neighbours,
    "scale by neighbours": scale_by_neighbours,
    "smaller steps": smaller_steps,
    "hold scores": hold_scores,
    "hold maps": hold_maps,
    "bounded gains": bounded_gains,
    "smaller head": smaller_head,
    "smaller head if guessing": smaller_head_if_guessing,
    "mask": mask,
    "restore queries": restore_queries,
    "restore ends": restore_ends,
    "restore": restore,
    "back and skip": back_and_skip,
    "back and slower": back_and_slower,
    "back and own data": back_and_own_data,
    "lower rate": lower_rate,
    "warm-up": warm_up,
    "usual betas": usual_betas,
    "steps as planned": steps_as_planned,
    "higher rate": higher_rate,
    "usual eps and scale": usual_eps_and_scale,
    "own data and scale": own_data_and_scale,
    "gains without decay": gains_without_decay,
    "slow embedding": slow_embedding,
    "train all": train_all,
    "train all as usual": train_all_as_usual,
    "whole loop as usual": whole_loop_as_usual,
    "float32": float32,
    "ignore padding": ignore_padding,
    "own data": own_data,
    "own data and mask": own_data_and_mask,
    "back and slow embedding": back_and_slow_embedding,
    "reset gradients": reset_gradients,
    "divide gradients": divide_gradients,
    "plain loss": plain_loss,
    "no hooks": no_hooks,
    "z-loss": z_loss,
}
"""Treatments by name."""
