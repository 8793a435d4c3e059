"""The least loss that is still within reach along a model's trajectory, as one table
(`ctrans hjb-check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ctrans.control.least_loss import LeastLoss
from ctrans.measure.measured import Answer, Measured, Value, along_depth
from ctrans.measure.measures import MEASURES, Measure

FLAT = 1e-6
"""A rise of the least loss by less than this many nats, or this share, is rounding."""

FEW = 4
"""The largest number of models whose curves are all drawn."""
DRAWN = ("pre", "peri")
"""Of more models these placements are, with the first norm."""

MEASURES.add(
    "ctrans hjb-check",
    {
        "least loss": Measure(
            formula=(
                "Phi(X_0, 0), the least loss that velocities which are free at each token reach"
                " from the embedding: no weights of the maps do better. From what is proven to what"
                " a search found"
            ),
            unit="nats",
            source="Hopf and Lax; Kan, eq. 56",
            shown_by="interval",
        ),
        "optimality gap": Measure(
            formula="the model's loss less the least loss, the sum over its sublayers",
            unit="nats",
            detail=True,
        ),
        "least loss within reach": Measure(
            formula=(
                "Phi(X, t), the least loss that free velocities still reach from the model's state."
                " It never falls, and ends at the model's loss. Where nothing bounds velocities it"
                " is flat and jumps at the end"
            ),
            unit="nats",
            scope="state",
            source="Hopf and Lax; Kan, eq. 56",
            log=False,
        ),
        "proven least loss": Measure(
            formula="what the least loss within reach is proven to be at least",
            unit="nats",
            scope="state",
            source="THEORY.md, section 4",
            bounds="least loss within reach",
        ),
        "optimality gap of a sublayer": Measure(
            formula=(
                "rise of the least loss within reach over a sublayer: what the sublayers after it"
                " can no longer gain"
            ),
            unit="nats",
            scope="sublayer",
            log=False,
            detail=True,
        ),
    },
)


def measured(models: Mapping[str, LeastLoss], kinds: Mapping[str, Sequence[str]]) -> Measured:
    """The table of several models, with the kinds of their sublayers. Of more than FEW models
    those of the placements DRAWN have a curve, with the first norm.
    """
    first = _first_of_placements(models)
    drawn = set(models)
    if len(models) > FEW:
        drawn = {first[placement] for placement in DRAWN if placement in first}
    values: list[Value] = []
    for name, reached in models.items():
        values += values_of(name, reached, kinds[name])
        if name in drawn:
            values += along_depth(name, "least loss within reach", reached.found)
            values += along_depth(name, "proven least loss", reached.proven)
    return Measured(
        values=tuple(values),
        missing={name: reached.missing for name, reached in models.items() if reached.missing},
        answers=answers(models, kinds),
    )


def values_of(model: str, reached: LeastLoss, kinds: Sequence[str]) -> Iterator[Value]:
    """The rows of a model."""
    found = reached.found[0]
    lower = reached.proven[0]
    if lower is None:
        yield Value(model, "least loss", found)
    else:
        words = f"{lower:.3g}-{found:.3g}"
        if f"{lower:.3g}" == f"{found:.3g}":
            words = f"{found:.3g}"
        yield Value(model, "least loss", found, words=words)
    yield Value(model, "optimality gap", reached.found[-1] - found)
    for k, (rise, kind) in enumerate(zip(reached.gaps, kinds, strict=True)):
        yield Value(model, "optimality gap of a sublayer", rise, depth=k, place=f"{k} ({kind})")


def answers(
    models: Mapping[str, LeastLoss], kinds: Mapping[str, Sequence[str]]
) -> tuple[Answer, ...]:
    """Where the optimality gap comes from, of one model for each placement."""
    first = _first_of_placements(models)
    sentences = []
    for placement, name in first.items():
        reached = models[name]
        total = reached.found[-1] - reached.found[0]
        if not reached.bounded[-2] or total <= FLAT:
            continue
        worst = max(range(len(reached.gaps)), key=lambda k: reached.gaps[k])
        sentences.append(
            f"the optimality gap of {placement} is {total:.3g} of {reached.found[-1]:.3g} nats,"
            f" {reached.gaps[worst]:.3g} of it from segment {worst} ({kinds[name][worst]})"
        )
    flat = [placement for placement, name in first.items() if not models[name].bounded[-2]]
    if flat:
        sentences.append(
            "the least loss within reach does not change before the last segment of"
            f" {', '.join(flat)}, as nothing bounds its velocities"
        )
    if not sentences:
        return ()
    text = "; ".join(sentences)
    norms = list(dict.fromkeys(name.partition(", ")[0] for name in first.values()))
    if len(first) < len(models):
        text = f"with {', '.join(norms)}, {text}"
    return (Answer(f"{text[0].upper()}{text[1:]}.", "note"),)


def _first_of_placements(models: Mapping[str, LeastLoss]) -> dict[str, str]:
    """The first model of each placement, by the placement in its name: layernorm, peri."""
    first: dict[str, str] = {}
    for name in models:
        norm, _, placement = name.partition(", ")
        first.setdefault(placement or norm, name)
    return first
