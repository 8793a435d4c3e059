"""The advice as code: treatments of a training or a model, and the treatment that each finding's advice names."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.clinic.bodies import Parts, redraw
from benchmarks.clinic.course import Course, cross_entropy
from ctrans.findings import Finding


@dataclasses.dataclass
class Case:
    """What a treatment may use: the course, the finding, and an earlier copy that was healthy as far as anyone knew."""

    course: Course
    finding: Finding | None = None
    earlier: Course | None = None

    @property
    def blocks(self) -> list[int]:
        """The blocks that the finding names; all of them if it names none."""
        places = [] if self.finding is None else [each.place for each in self.finding.readings]
        named = [int(number) for place in places for number in re.findall(r"block (\d+)", place)]
        return sorted({k for k in named if k < len(self.course.body.blocks)}) or [*range(len(self.course.body.blocks))]

    @property
    def parts(self) -> list[Parts]:
        return [self.course.body.blocks[k] for k in self.blocks]

    @property
    def of_attention(self) -> bool:
        return self.finding is not None and "attention" in self.finding.place


Treatment = Callable[[Case], None]


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


def _maps(part: Parts, attention: bool) -> list[Any]:
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


@torch.no_grad()
def median_gains(case: Case) -> None:
    """Gains far from their norm's median get the median."""
    norms = [norm for part in case.parts for norm in part.norms] + [case.course.body.part("final_norm")]
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


def smaller_positions(case: Case) -> None:
    places, words = case.course.body.part("positions"), case.course.body.part("embedding")
    if places is not None:
        _scale([places], _size([words]) / max(1e-12, _size([places])))


def scores_by_neighbours(case: Case) -> None:
    """Queries and keys get the size of those in the blocks beside, or a tenth if all blocks are named."""
    for k in case.blocks:
        part = case.course.body.blocks[k]
        for view, read in ((part.q, lambda p: _size(p.q)), (part.k, lambda p: _size(p.k))):
            wanted = _beside(case, k, read)
            _scale(view, wanted / max(1e-12, _size(view)) if len(case.blocks) < len(case.course.body.blocks) else 0.3)


def scale_by_neighbours(case: Case) -> None:
    for k in case.blocks:
        for linear in _maps(case.course.body.blocks[k], case.of_attention):
            wanted = _beside(case, k, lambda p: _size([_maps(p, case.of_attention)[0].weight]))
            _scale([linear.weight], wanted / max(1e-12, _size([linear.weight])))


def smaller_steps(case: Case) -> None:
    for part in case.parts:
        _scale([part.out.weight, part.down.weight], 0.3)


def smaller_head(case: Case) -> None:
    head = case.course.body.part("head")
    _scale([head], head.shape[-1] ** -0.5 / max(1e-12, _size([head])))


def mask(case: Case) -> None:
    case.course.body.set_causal(True)


def restore(case: Case) -> None:
    """The weights of the earlier copy."""
    if case.earlier is not None:
        kept = {name: each.clone() for name, each in case.earlier.body.model.state_dict().items()}
        case.course.body.model.load_state_dict(kept)


def back_and_skip(case: Case) -> None:
    """Weights and moments of the earlier copy; the batches since then are not read again."""
    restore(case)
    if case.earlier is not None:
        case.course.optimiser.load_state_dict(case.earlier.optimiser.state_dict())


def lower_rate(case: Case) -> None:
    case.course.rate *= 0.1


def back_and_lower(case: Case) -> None:
    back_and_skip(case)
    lower_rate(case)


def warm_up(case: Case) -> None:
    case.course.rate *= 0.3
    case.course.warm_up = case.course.step + 50


def usual_betas(case: Case) -> None:
    _optimiser(case, betas=(0.9, 0.95))


def _optimiser(case: Case, **options: Any) -> None:
    case.course.make_optimiser(**options)


def steps_as_planned(case: Case) -> None:
    """Adam's eps, the loss's scale and the schedule as they are usually."""
    case.course.scale, case.course.ends_at = 1.0, 10**6
    _optimiser(case)


def gains_without_decay(case: Case) -> None:
    _optimiser(case)
    unit_gains(case)


def slow_embedding(case: Case) -> None:
    case.course.embedding_factor = 0.3
    _optimiser(case)


def train_all(case: Case) -> None:
    for weight in case.course.body.model.parameters():
        weight.requires_grad_(True)
    _optimiser(case)


def own_data(case: Case) -> None:
    """The data as the task has them: shifted labels, its own tokenizer, other batches."""
    case.course.data = None


def own_data_and_mask(case: Case) -> None:
    own_data(case)
    mask(case)


def reset_gradients(case: Case) -> None:
    case.course.zero_every = 1
    case.course.optimiser.zero_grad()


def divide_gradients(case: Case) -> None:
    case.course.micro, case.course.clip = 1, 1.0


def plain_loss(case: Case) -> None:
    case.course.loss = None


def no_hooks(case: Case) -> None:
    """Hooks that change what a module returns are removed."""
    for module in case.course.body.model.modules():
        module._forward_hooks.clear()


def z_loss(case: Case) -> None:
    case.course.loss = lambda c, step, logits, targets: (
        cross_entropy(logits, targets) + 1e-3 * logits.logsumexp(-1).square().mean()
    )
    lower_rate(case)


def nothing(case: Case) -> None:
    """The advice asks for no change."""


TREATMENTS: dict[str, Treatment] = {
    "nothing": nothing,
    "redraw sublayer": redraw_sublayer,
    "redraw router": redraw_router,
    "median gains": median_gains,
    "unit gains": unit_gains,
    "small eps": small_eps,
    "smaller embedding": _to_size("embedding", 0.3),
    "larger embedding": _to_size("embedding", 0.3),
    "smaller positions": smaller_positions,
    "smaller scores": scores_by_neighbours,
    "scores by neighbours": scores_by_neighbours,
    "scale by neighbours": scale_by_neighbours,
    "smaller steps": smaller_steps,
    "smaller head": smaller_head,
    "mask": mask,
    "restore": restore,
    "back and skip": back_and_skip,
    "back and lower": back_and_lower,
    "lower rate": lower_rate,
    "warm-up": warm_up,
    "usual betas": usual_betas,
    "steps as planned": steps_as_planned,
    "gains without decay": gains_without_decay,
    "slow embedding": slow_embedding,
    "train all": train_all,
    "own data": own_data,
    "own data and mask": own_data_and_mask,
    "reset gradients": reset_gradients,
    "divide gradients": divide_gradients,
    "plain loss": plain_loss,
    "no hooks": no_hooks,
    "z-loss": z_loss,
}
"""Treatments by name."""

ADVICE: dict[str, str] = {
    # of ctrans diagnose
    "not finite": "restore",
    "reads future tokens": "mask",
    "dead gain around the state": "median gains",
    "dead gain of an output norm": "median gains",
    "dead gain of an input norm": "median gains",
    "dead gain outside the depth": "median gains",
    "dead norm": "unit gains",
    "zero weight": "redraw sublayer",
    "heads of zeros": "redraw sublayer",
    "gain too large": "median gains",
    "eps dominates the norm": "small eps",
    "embedding dominates the depth": "smaller embedding",
    "positions dominate the text": "smaller positions",
    "sublayer output too large": "scale by neighbours",
    "sublayer output too small": "scale by neighbours",
    "dead sublayer": "redraw sublayer",
    "sensitivity too large": "scale by neighbours",
    "sensitivity near zero": "redraw sublayer",
    "saturated heads": "smaller scores",
    "massive activation": "nothing",
    "rank collapse": "smaller steps",
    "unused block": "redraw sublayer",
    "weight decay below threshold": "nothing",
    "output gains too large": "smaller steps",
    "logits drift": "smaller head",
    "worse than guessing": "own data",
    "tied gradients oppose": "nothing",
    "not the same twice": "no hooks",
    "silenced outlier channel": "nothing",
    "scores of another scale": "scores by neighbours",
    "dead units": "redraw sublayer",
    "sublayer raises the loss": "restore",
    # of the monitor
    "updates near zero": "steps as planned",
    "targets leak": "own data and mask",
    "near the end of float16": "nothing",
    "attention logits grow": "lower rate",
    "output logits drift": "z-loss",
    "embedding grows": "slow embedding",
    "hidden states grow too large": "lower rate",
    "gradients explode by depth": "warm-up",
    "gradients vanish by depth": "warm-up",
    "gradient spike": "back and skip",
    "loss spike": "back and lower",
    "updates too large": "lower rate",
    "Adam's second moments too small": "usual betas",
    "Adam's second moments too large": "usual betas",
    "beyond the edge of stability": "lower rate",
    "attention collapsed": "lower rate",
    "step larger than the state": "smaller steps",
    "dead layer": "redraw sublayer",
    "frozen layer": "train all",
    "router collapse": "redraw router",
}
"""The treatment that carries out the advice of each check: the first act that the text names and that code can do. A name that both the
diagnosis and the monitor have has one entry; `advice` chooses the monitor's for "not finite"."""


def advice(finding: Finding) -> str:
    if finding.check == "not finite" and finding.step is not None:
        return "back and lower"
    return ADVICE.get(finding.check, "nothing")


def placebo(own: str, monitor: bool, key: str) -> str:
    """The treatment of another check of the same topic, drawn by a hash; never "nothing"."""
    names = sorted({*ADVICE.values(), "back and lower"} - {own, "nothing"})
    of_training = {
        "lower rate",
        "z-loss",
        "slow embedding",
        "warm-up",
        "back and skip",
        "back and lower",
        "usual betas",
        "train all",
    }
    chosen = [name for name in names if monitor or name not in of_training]
    return chosen[int(hashlib.sha256(f"placebo:{key}".encode()).hexdigest(), 16) % len(chosen)]
