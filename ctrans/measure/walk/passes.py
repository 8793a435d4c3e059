"""The walk: down the depth and, with a loss, back up. Instruments receive each state and costate.

Down: X_{k+1} = step_k(X_k). Back: P_k = (dX_{k+1}/dX_k)' P_{k+1} from P_K = dL/dX_K. This is the
discrete model and autograd's gradient, with the weights and graph of one segment at a time. Several
lanes, each a batch with its own instruments, go together. So weights on demand are made once on
each way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.as_found import leaving_as_found
from ctrans.base.shapes import TokenMask, TokenRows
from ctrans.dynamics.depth import Depth, check_matches
from ctrans.dynamics.fields import norms_found_once
from ctrans.dynamics.norm import SphereNorm
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk.instrument import Instrument, States, StepContext, StepContextBack, Turn
from ctrans.measure.walk.model import Model, check_targets, kept_of, terminal_loss
from solvers import ConfigError, Map, shown

SegmentCallback = Callable[[int], None]
"""Called with k when segment k is done, on each way."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lane:
    """A batch of sequences with its instruments. With targets it also goes back up."""

    tokens: Tensor
    targets: Any
    instruments: Sequence[Instrument]


@leaving_as_found
def walk(
    model: Model,
    tokens: Tensor,
    targets: Any = None,
    instruments: Sequence[Instrument] = (),
    *,
    progress: SegmentCallback | None = None,
) -> list[Any]:
    """The instruments' figures, in their order, after one walk of these tokens; with targets also
    back.

    L is the model's own loss (`terminal_loss`); for language models the mean cross-entropy in nats
    without targets of -1. The walk changes no parameter's gradient. It continues with non-finite
    states. Raises ConfigError for targets that do not match the tokens or are all -1, and the
    instruments' own errors.

    >>> walk(model, tokens, targets, [Moments(), ParameterGradients()])
    """
    looking_back = [
        type(instrument).__name__ for instrument in instruments if instrument.looks_back
    ]
    if targets is None and looking_back:
        raise ConfigError(
            f"{', '.join(looking_back)} ask for the way back, and so for a loss: give targets"
        )
    walk_lanes(model, [Lane(tokens, targets, instruments)], progress=progress)
    return [instrument.figures() for instrument in instruments]


@torch.no_grad()
@leaving_as_found
def walk_lanes(model: Model, lanes: Sequence[Lane], *, progress: SegmentCallback | None) -> None:
    """Walks all lanes together, segment by segment. Raises as `walk`. Call each instrument's
    `figures()` afterwards.
    """
    for lane in lanes:
        if lane.targets is not None:
            check_targets(model, lane.tokens, lane.targets)
    walks = [_walked(lane, model.depth, model.embed(lane.tokens).detach(), model) for lane in lanes]
    _together(walks, progress)


@torch.no_grad()
@leaving_as_found
def walk_depth(
    depth: Depth,
    x0: TokenRows,
    instruments: Sequence[Instrument],
    *,
    progress: SegmentCallback | None = None,
) -> list[Any]:
    """The figures of instruments that need no loss, after one walk down the depth from X_0. Raises
    ConfigError for an X_0 of another width.
    """
    check_matches("x0", x0, depth.parameters())
    lane = Lane(torch.empty(0, dtype=torch.int64), None, instruments)
    try:
        _together([_walked(lane, depth, x0.detach())], progress)
    except RuntimeError as error:
        widths = {norm.width for norm in depth.modules() if isinstance(norm, SphereNorm)}
        if not widths or x0.shape[-1] in widths:
            raise
        raise ConfigError(
            f"x0 has the width {x0.shape[-1]}, and the norms have {min(widths)}: give states of"
            " that width"
        ) from error
    return [instrument.figures() for instrument in instruments]


def states_of(depth: Depth, x0: TokenRows) -> list[TokenRows]:
    """X_0 and X_{k+1} = step_k(X_k) of the discrete Transformer, without a graph. States may be
    non-finite.
    """
    states: list[Tensor] = walk_depth(depth, x0, [States()])[0]
    return states


@torch.no_grad()
@leaving_as_found
def observe(
    depth: Depth,
    states: Sequence[TokenRows],
    instruments: Sequence[Instrument],
    *,
    kept: TokenMask | None = None,
) -> list[Any]:
    """The instruments' figures along known states: X_0 and X at the ends of the segments that were
    reached.

    Nothing is integrated, so the states may come from any method. `kept` has the tokens that are
    text and not padding; None if all are.
    """
    if not len(states):
        raise ConfigError("states = []: give at least X_0")
    _begin(instruments, depth, states[0], kept)
    for (k, sublayer, time, h), x, y in zip(_segments(depth), states, states[1:], strict=False):
        for instrument in instruments:
            instrument.forward(StepContext(k, sublayer, time, h, x, y))
    return [instrument.figures() for instrument in instruments]


def _segments(depth: Depth) -> Iterator[tuple[int, Sublayer, float, float]]:
    """Index, sublayer, start and length in depth-time of each segment."""
    yield from zip(
        range(len(depth.sublayers)), depth.sublayers, depth.times, depth.lengths, strict=False
    )


def _together(walks: Sequence[Iterator[int]], progress: SegmentCallback | None) -> None:
    """Takes all walks to their ends, each by one segment at a time."""
    while True:
        with norms_found_once():
            segments = [next(lane, None) for lane in walks]
        reached = [segment for segment in segments if segment is not None]
        if not reached:
            return
        if progress is not None:
            progress(reached[0])


def _begin(
    instruments: Sequence[Instrument], depth: Depth, x0: Tensor, kept: Tensor | None
) -> None:
    """Begins a walk from X_0. `kept` is repeated to its batch, as the mask of an example is."""
    text: Tensor | None = None
    if kept is not None and kept.shape[-1] == x0.shape[-2]:
        sequences = torch.arange(x0.shape[:-2].numel()) % len(kept)
        text = kept[sequences].to(x0.device).reshape(x0.shape[:-1])
    for instrument in instruments:
        instrument.kept = text
        instrument.begin(depth, x0)


def _walked(lane: Lane, depth: Depth, x0: Tensor, model: Model | None = None) -> Iterator[int]:
    """Walks a lane from X_0 and yields each segment's number when it is done: down the depth and,
    with a model and targets, back.
    """
    text: Tensor | None = None
    if model is not None:
        text = kept_of(model)
    _begin(lane.instruments, depth, x0, text)
    segments = list(_segments(depth))
    x = x0
    states = [x0]
    for k, sublayer, time, h in segments:
        passage = StepContext(k, sublayer, time, h, x, sublayer.step(x, h))
        for instrument in lane.instruments:
            instrument.forward(passage)
        x = passage.y
        if lane.targets is not None:
            states.append(x)
        yield k
    if model is None or lane.targets is None:
        return
    loss, p = value_and_pullback(lambda x: terminal_loss(model, x, lane.targets), x)
    turn = Turn(lane.tokens, lane.targets, x, float(loss), p)
    for instrument in lane.instruments:
        instrument.head(model, turn)
    for k, sublayer, time, h in reversed(segments):
        y = states.pop()
        x = states[-1]
        before = value_and_pullback(partial(sublayer.step, dt=h), x, p)[1]
        passage_back = StepContextBack(k, sublayer, time, h, x, y, p, before)
        for instrument in lane.instruments:
            instrument.backward(passage_back)
        p = before
        yield k
    for instrument in lane.instruments:
        instrument.embedding(model, lane.tokens, p)


@torch.enable_grad()
def value_and_pullback(
    function: Map, x: Float[Tensor, "*x"], p: Float[Tensor, "*y"] | None = None
) -> tuple[Tensor, Tensor]:
    """(y, (dy/dx)' p) for y = function(x). Without p, y is a number and p is 1.

    Raises ConfigError for code that passes no gradient on to x.
    """
    x = x.detach().requires_grad_()
    y = function(x)
    shape: tuple[int, ...] = ()
    if p is not None:
        shape = p.shape
    if y.shape != shape:
        raise ConfigError(
            f"p = {shown(p)}: give one of the shape {tuple(y.shape)} of the function's value"
        )
    # the gradient of <p, y> is the same to the bit. If p is passed to autograd, it imports sympy
    number = y if p is None else (y * p).sum()
    if not number.requires_grad:
        raise ConfigError(
            "no gradient reaches the state: the model's code stops it (detach, no_grad, or a copy"
            " through numpy), so there is no costate"
        )
    (gradient,) = torch.autograd.grad(number, x)
    return y.detach(), gradient
