"""What the controls can move independently of each other, as rows of the table of `ctrans hjb-check
--principle`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ctrans.control.controllability import Controllability, Gramian
from ctrans.measure.measured import Value, along_depth
from ctrans.measure.measures import MEASURES, Measure

_TOPIC = "Controllability"
_SHARE = (
    "share of segment k in the trace of G = C'W C, C the gradients of {} by the last state and W"
    " the Gramian of the linearised flow with controls {}"
)
_TOKENS = "single tokens' losses"
_CLASSES = "single logits of the last token"
_WEIGHTS = (
    "dX_(k+1)/dW_k, so that G is the neural tangent kernel of the depth's weights, where one that"
    " segments share counts as a free one of each"
)
_VELOCITIES = "h, a velocity that is free at each token"
CONTROLLABILITY = "controllability by weights"
"""The measure that the reason is filed under if there is no Gramian."""
_EIGENVALUE = "eigenvalue of G, in squares of nats or logits per unit of the control"

_SHARES = {
    CONTROLLABILITY: (_TOKENS, _WEIGHTS),
    "controllability by free velocities": (_TOKENS, _VELOCITIES),
    "controllability of logits by weights": (_CLASSES, _WEIGHTS),
    "controllability of logits by free velocities": (_CLASSES, _VELOCITIES),
}
"""The outputs and the controls of each share of a trace."""

for _name, (_of, _by) in _SHARES.items():
    MEASURES.add(
        "ctrans hjb-check --principle",
        {
            _name: Measure(
                formula=_SHARE.format(_of, _by),
                unit="share of the Gramian's trace",
                scope="sublayer",
                topic=_TOPIC,
                source="Kalman 1960; Jacot, Gabriel, Hongler 2018 for weights",
                share=True,
                log=False,
                drawn="bars",
                detail=_of == _CLASSES,
            )
        },
    )
for _controls in ("weights", "free velocities"):
    for _outputs in ("token losses", "logits"):
        MEASURES.add(
            "ctrans hjb-check --principle",
            {
                f"rank of {_outputs} by {_controls}": Measure(
                    formula=f"rank of G, of so many {_outputs}: the controls can move these"
                    " independently of each other, to first order",
                    topic=_TOPIC,
                    shown_by="words",
                ),
                f"smallest eigenvalue of {_outputs} by {_controls}": Measure(
                    formula=f"smallest {_EIGENVALUE}", topic=_TOPIC, detail=True
                ),
                f"largest eigenvalue of {_outputs} by {_controls}": Measure(
                    formula=f"largest {_EIGENVALUE}", topic=_TOPIC, detail=True
                ),
                f"condition of {_outputs} by {_controls}": Measure(
                    formula="largest over smallest eigenvalue of G; infinite below full rank",
                    topic=_TOPIC,
                    detail=True,
                ),
            },
        )


def values_of(model: str, found: Controllability) -> Iterator[Value]:
    """The rows of the table."""
    gramians_of = {_TOKENS: found.tokens, _CLASSES: found.classes}
    for name, (outputs, controls) in _SHARES.items():
        gramians = gramians_of[outputs]
        gramian = gramians.weights if controls == _WEIGHTS else gramians.velocities
        yield from along_depth(model, name, gramian.shares)
    families = {"token losses": found.tokens, "logits": found.classes}
    for outputs, gramians in families.items():
        for controls, gramian in {
            "weights": gramians.weights,
            "free velocities": gramians.velocities,
        }.items():
            yield from _figures(model, outputs, controls, gramian)


def _figures(model: str, _outputs: str, _controls: str, gramian: Gramian) -> Iterator[Value]:
    """Rank, extreme eigenvalues and condition of one Gramian."""
    count = len(gramian.eigenvalues)
    smallest = float(gramian.eigenvalues[0].clamp(min=0))
    largest = float(gramian.eigenvalues[-1])
    condition = math.inf
    if gramian.rank == count:
        condition = largest / smallest
    rank = f"rank of {_outputs} by {_controls}"
    yield Value(model, rank, float(gramian.rank), words=f"{gramian.rank} of {count}")
    yield Value(model, f"smallest eigenvalue of {_outputs} by {_controls}", smallest)
    yield Value(model, f"largest eigenvalue of {_outputs} by {_controls}", largest)
    yield Value(model, f"condition of {_outputs} by {_controls}", condition)


def note_of(found: Controllability) -> str:
    """What the ranks mean, in one sentence."""
    losses = len(found.places)
    logits = len(found.labels)
    return (
        f"to first order, the weights of attention and FFN can move {found.tokens.weights.rank} of"
        f" {losses} tokens' losses independently of each other, and {found.classes.weights.rank} of"
        f" {logits} logits of the last token; free velocities {found.tokens.velocities.rank} and"
        f" {found.classes.velocities.rank}"
    )
