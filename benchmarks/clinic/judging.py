"""The rules of PROTOCOL.md: what counts as the right cause, when the loss shows a fault, and what
counts as healed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CATEGORIES: dict[str, tuple[str, ...]] = {
    "attention scale": (
        "saturated heads",
        "attention logits grow",
        "attention collapsed",
        "scores of another scale",
        "most heads saturated",
    ),
    "dead part": (
        "dead sublayer",
        "zero weight",
        "heads of zeros",
        "dead layer",
        "sensitivity near zero",
        "dead units",
    ),
    "embedding": (
        "embedding dominates the depth",
        "embedding grows",
        "embedding updates too large",
        "targets are not predicted",
        "worse than counting",
    ),
    "positions": ("positions dominate the text",),
    "wrong weights": ("sublayer raises the loss",),
    "block not loaded": ("block untrained", "weight untrained", "sublayer raises the loss"),
    "end not loaded": (
        "weight untrained",
        "targets are not predicted",
        "worse than counting",
        "worse than guessing",
    ),
    "missing part": (),
    "code": (),
    "copies": ("blocks with equal weights",),
    "precision": ("steps are lost to rounding", "updates near zero"),
    "data": (
        "targets are not predicted",
        "worse than counting",
        "worse than guessing",
        "tokens unlike those before",
        "loss stays high",
        "loss spike",
    ),
    "padding": ("padding is predicted",),
    "targets": ("targets are not the next tokens", "targets unrelated to inputs"),
    "decay": (),
    "cut path": (
        "dead layer",
        "frozen layer",
        "gradients vanish by depth",
        "nothing moves",
        "targets unrelated to inputs",
    ),
    "softmax axis": ("reads future tokens", "tokens read both ways"),
    "future tokens": ("reads future tokens", "tokens read both ways"),
    "leak": ("targets leak", "targets are not the next tokens", "reads future tokens"),
    "not finite": ("not finite",),
    "gains": (
        "dead gain around the state",
        "dead gain of an output norm",
        "dead gain of an input norm",
        "dead gain outside the depth",
        "dead norm",
        "gain too large",
    ),
    "norm": ("eps dominates the norm",),
    "sublayer scale": (
        "sublayer output too large",
        "sublayer output too small",
        "unused block",
        "hidden states grow too large",
        "step larger than the state",
        "sublayer outgrows its past",
    ),
    "outliers": ("massive activation",),
    "logits": (
        "logits drift",
        "output logits drift",
        "worse than guessing",
        "targets are not predicted",
        "worse than counting",
    ),
    "tokens": ("worse than guessing", "targets are not predicted", "worse than counting"),
    "noise": ("not the same twice",),
    "routing": ("router collapse",),
    "rate": (
        "updates too large",
        "beyond the edge of stability",
        "gradients explode by depth",
        "gradients vanish by depth",
    ),
    "stalled": (
        "updates near zero",
        "nothing moves",
        "learning rate has ended",
        "no better than guessing",
    ),
    "moments": (
        "Adam's second moments too small",
        "Adam's second moments too large",
        "Adam remembers too long",
    ),
    "labels": (
        "loss spike",
        "loss stays high",
        "targets unrelated to inputs",
        "tokens unlike those before",
        "no better than guessing",
    ),
    "bad batch": (
        "loss spike",
        "gradient spike",
        "one token fills the batch",
        "tokens unlike those before",
    ),
    "repeats": ("held loss rises", "same batch again"),
    "frozen": (
        "frozen layer",
        "nothing moves",
        "weights in no group",
        "embedding or head in no group",
        "no better than guessing",
    ),
    "stale gradients": ("gradients are not reset", "accumulation is not divided"),
    "loss": ("softmax twice", "loss is raised", "no better than guessing"),
}
"""The checks that name each category of cause."""
MANY_CAUSES = ("no better than guessing", "targets are not predicted", "worse than counting")
"""Checks whose text names several causes; the second report also counts without them."""
SHOWN, SETTLED = 0.25, 9
"""In nats, and in steps: the loss shows a fault where its median of `SETTLED` steps is this far
from the healthy training's.
"""
SIGMA, WINDOW = 6.0, 128
"""The rule of OLMo-core's SkipStep: deviations above the mean of that number of steps before."""
NATS, SHARE = 0.05, 0.05
"""A loss counts as the healthy one if it is at most this much, or this share of the healthy one,
above it.
"""


def names(category: str, check: str) -> bool:
    return check in CATEGORIES[category]


def smooth(losses: Sequence[float]) -> np.ndarray:
    values = np.nan_to_num(np.array(losses), nan=99.0, posinf=99.0)
    return np.array(
        [np.median(values[max(0, i - SETTLED + 1) : i + 1]) for i in range(len(values))]
    )


def shows(losses: Sequence[float], healthy: Sequence[float], start: int) -> int | None:
    """The first step (from 1) from `start` on at which the loss is apart from the healthy one's;
    None if it never is.
    """
    count = min(len(losses), len(healthy))
    apart = np.abs(smooth(losses)[:count] - smooth(healthy)[:count]) > SHOWN
    found = np.flatnonzero(apart[start:])
    if len(found):
        return start + int(found[0]) + 1
    return len(losses) if len(losses) < len(healthy) else None


def six_sigma(values: Sequence[float], start: int) -> int | None:
    """The first step (from 1) after `start` with a value above mean + 6 deviations of the `WINDOW`
    before, or not finite.
    """
    for end in range(max(start, 8), len(values)):
        before = np.array(values[max(0, end - WINDOW) : end])
        if not math.isfinite(values[end]) or values[end] > before.mean() + SIGMA * before.std():
            return end + 1
    return None


def tolerance(healthy: float) -> float:
    return max(NATS, SHARE * healthy)


def outcome(loss: float, untreated: float, healthy: float) -> str:
    """healed: within the tolerance of the healthy loss. harm: above the untreated loss by more than
    it. Else: no change.
    """
    if loss <= healthy + tolerance(healthy):
        return "healed"
    if not math.isfinite(loss):
        return "no change" if not math.isfinite(untreated) else "harm"
    return "harm" if loss > untreated + tolerance(healthy) else "no change"


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95% interval of Wilson for a share."""
    if not of:
        return 0.0, 1.0
    z, p = 1.96, hits / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return max(0.0, (middle - half) / (1 + z * z / of)), min(
        1.0, (middle + half) / (1 + z * z / of)
    )


def share_of(hits: int, of: int) -> str:
    """A share with its interval: "22 of 24 (92%; 74% to 98%)"."""
    low, high = wilson(hits, of)
    return f"{hits} of {of} ({hits / max(of, 1):.0%}; {low:.0%} to {high:.0%})"
