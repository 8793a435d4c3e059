"""What `ctrans train` measures of a run, as one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ctrans.base.json_values import plain
from ctrans.measure.findings import Mark
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure

LEARNED = 0.1
"""A run that ends less than this many nats below a model without depth shows little of depth."""
_NATS = "cross-entropy, nats a token"

MEASURES.add(
    "ctrans train",
    {
        "how it ended": Measure(
            key="ending", formula="finished, stopped, diverged, or out of time"
        ),
        "iterations done": Measure(key="step", formula="the number of optimiser steps"),
        "first loss": Measure(
            key="first_validation_loss",
            formula="validation loss before the first iteration, nats a token",
            unit="nats a token",
        ),
        "last loss": Measure(
            key="validation_loss", formula="validation loss at the end", unit="nats a token"
        ),
        "best loss": Measure(
            key="best_validation_loss", formula="the lowest validation loss", unit="nats a token"
        ),
        "loss without depth": Measure(
            key="depthless_loss",
            formula="what a table reaches that knows only the current token and its place",
            unit="nats a token",
        ),
        "loss of frequencies": Measure(
            key="frequencies_loss",
            formula="what a model reaches that knows only how often each target comes",
            unit="nats a token",
            detail=True,
        ),
        "best iteration": Measure(key="best_step", formula="the iteration with the best loss"),
        "accuracy": Measure(key="accuracy", formula="share of the held-out answers that are right"),
        "parameters": Measure(key="parameters", formula="the number of parameters"),
        "trained parameters": Measure(
            key="trained_parameters",
            formula="parameters that are trained: fewer with adapters of low rank",
        ),
        "training loss": Measure(
            key="training",
            formula="means over about a hundred stretches of iterations",
            unit=_NATS,
            scope="size",
            over="iteration",
            log=False,
        ),
        "validation loss": Measure(
            key="validation",
            formula="of text that the model is not trained on",
            unit=_NATS,
            scope="size",
            over="iteration",
            log=False,
        ),
        "learning rate by iteration": Measure(
            key="learning_rate",
            formula="the optimiser's learning rate",
            title="learning rate over time",
            unit="learning rate",
            scope="size",
            over="iteration",
            log=False,
        ),
        "gradient by iteration": Measure(
            key="gradient_norm",
            formula="|dL/dW|, all weights, before clipping",
            title="gradient over time",
            unit="|dL/dW|",
            scope="size",
            over="iteration",
        ),
        "growth of the hidden state": Measure(
            key="growth",
            formula="size of the last hidden state over that of the first one",
            unit="rms X_T / rms X_0",
            scope="size",
            over="iteration",
        ),
        "largest entry by iteration": Measure(
            key="largest",
            formula="largest |x| of any hidden state",
            title="largest entry over time",
            unit="largest |x|",
            scope="size",
            over="iteration",
        ),
        "loss with other numbers of blocks": Measure(
            formula="validation loss of the same weights in other numbers of blocks",
            unit="validation loss, nats a token",
            scope="size",
            over="blocks",
            log=False,
        ),
    },
    picture="loss",
)


def measured(runs: Mapping[str, Mapping[str, Any]]) -> Measured:
    """The table of runs, each as its JSON object, by name; an empty name stands for the
    placement.
    """
    named = {}
    for name, run in runs.items():
        settings = plain(run.get("model")) or {}
        named[name or str(settings.get("placement", "run"))] = run
    styles = {}
    for name, run in named.items():
        placement = (plain(run.get("model")) or {}).get("placement")
        if isinstance(placement, str):
            styles[name] = placement
    return Measured(
        values=tuple(value for name, run in named.items() for value in values(name, run)),
        answers=tuple(answer(name, run) for name, run in named.items()),
        styles=styles,
    )


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a training's JSON of version 1."""
    return measured({"": result})


def values(model: str, run: Mapping[str, Any]) -> Iterator[Value]:
    """The rows of a run."""
    for measure, key in MEASURES.keyed("ctrans train").items():
        figure = run.get(key)
        if figure is None or _adds_nothing(key, run):
            continue
        if isinstance(figure, str):
            yield Value(model, measure, None, words=figure)
        else:
            yield Value(model, measure, float(figure))
    curves = {**(run.get("losses") or {}), **(run.get("curves") or {})}
    for measure, key in MEASURES.keyed("ctrans train", scope="size").items():
        for step, figure in curves.get(key) or ():
            yield Value(model, measure, figure, step=step)
    depths = run.get("other_depths") or {}
    for depth in sorted(depths, key=int):
        figure = depths[depth]
        yield Value(model, "loss with other numbers of blocks", figure, step=int(depth))


def _adds_nothing(key: str, run: Mapping[str, Any]) -> bool:
    return key == "trained_parameters" and run.get(key) == run.get("parameters")


def answer(name: str, run: Mapping[str, Any]) -> Answer:
    """How a run ended, and how much it learned."""
    ending = run.get("ending")
    step = run.get("step")
    floor = run.get("depthless_loss")
    first, last = run.get("first_validation_loss"), run.get("validation_loss")
    best = run.get("best_validation_loss")
    sentences = [f"{name}: {ending} after {step:,} iterations"]
    if first is not None and last is not None:
        sentences.append(f"The validation loss went from {first:.3g} to {last:.3g} nats a token")
    text = ". ".join(sentences)
    if best is not None:
        text += f"; the best validation loss is {best:.4f} at step {run.get('best_step')}"
        if floor is not None and best > floor - LEARNED:
            text += (
                f". A table that knows only the current token has {floor:.3g}: this training shows"
                " little of what depth does"
            )
    marks: dict[str, Mark] = {"diverged": "bad", "finished": ""}
    return Answer(f"{text}.", marks.get(str(ending), "note"))
