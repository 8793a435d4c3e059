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
                " from the embedding, as a search found it: no weights of the maps do better at"
                " these gains and ends. For our own GPT, from what is proven to what was found"
            ),
            unit="loss",
            source="Hopf and Lax; Kan, eq. 56",
            shown_by="interval",
        ),
        "optimality gap": Measure(
            formula="the model's loss less the least loss, the sum over its sublayers",
            unit="loss",
            detail=True,
        ),
        "least loss within reach": Measure(
            formula=(
                "Phi(X, t), the least loss that free velocities still reach from the model's state."
                " It never falls, and ends at the model's loss. Where every state is within reach,"
                " it is flat and jumps at the end"
            ),
            unit="loss",
            scope="state",
            source="Hopf and Lax; Kan, eq. 56",
            log=False,
        ),
        "proven least loss": Measure(
            formula="what the least loss within reach is proven to be at least",
            unit="loss",
            scope="state",
            source="THEORY.md, section 4",
            bounds="least loss within reach",
        ),
        "optimality gap of a token": Measure(
            formula=(
                "what a token adds to the optimality gap, times the number of targets. Red: much."
                " Blue: little"
            ),
            unit="nats",
            scope="token",
        ),
        "optimality gap of a sublayer": Measure(
            formula=(
                "rise of the least loss within reach over a sublayer: what the sublayers after it"
                " can no longer gain"
            ),
            unit="loss",
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


def of_tokens(model: str, reached: LeastLoss, words: Sequence[str]) -> Iterator[Value]:
    """The optimality gap of each token of the first sequence, with its text."""
    if reached.by_token is None:
        return
    number = reached.by_token[-1].count_nonzero()
    gaps = number * (reached.by_token[-1] - reached.by_token[0])
    for k, (word, gap) in enumerate(zip(words, gaps[0].tolist(), strict=False)):
        yield Value(model, "optimality gap of a token", gap, step=k, place=word)


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
            f"the optimality gap of {placement} is {total:.3g} of its loss of"
            f" {reached.found[-1]:.3g},"
            f" {reached.gaps[worst]:.3g} of it from segment {worst} ({kinds[name][worst]})"
        )
    flat = [placement for placement, name in first.items() if not models[name].bounded[-2]]
    if flat:
        sentences.append(
            "the least loss within reach does not change before the last segment of"
            f" {', '.join(flat)}, as free velocities reach every state, or every state of a norm"
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
