"""Instruments: a walk gives them each state and, on the way back, each costate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import TokenMask, TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.missing import tried
from ctrans.measure.walk.model import Model


@dataclass(frozen=True, eq=False)
class StepContext:
    """Segment k of the depth: `sublayer` acts from depth-time `time` for a time `h`, from X_k = `x`
    to X_{k+1} = `y`.
    """

    k: int
    sublayer: Sublayer
    time: float
    h: float
    x: TokenRows
    y: TokenRows

    @property
    def entered(self) -> TokenRows:
        """X_k as the input of the segment's field: its streams are mixed if it has several."""
        return self.sublayer.enter(self.x)


@dataclass(frozen=True, eq=False)
class StepContextBack(StepContext):
    """The same on the way back, with the costates at both ends: `p` = dL/dX_{k+1} and `before` =
    dL/dX_k.
    """

    p: TokenRows
    before: TokenRows

    @property
    def met(self) -> tuple[TokenRows, TokenRows]:
        """(X, P) at the input of the segment's field: `x` and `before`, except for states of
        several streams.
        """
        return self.sublayer.met(self.x, self.before, self.p, self.h)


@dataclass(frozen=True, eq=False)
class Turn:
    """The end of the depth in a walk with a loss L: X_T = `x`, L and `p` = dL/dX_T, for these
    tokens and targets.
    """

    tokens: Tensor
    targets: Any
    x: TokenRows
    loss: float
    p: TokenRows


def of_text(x: TokenRows, kept: TokenMask | None) -> Float[Tensor, "... width"]:
    """The rows of x that are text, (rows, width); x itself without padding."""
    if kept is None:
        return x
    return x[kept]


class Instrument:
    """Receives a walk's states and costates by the methods below, in this order. An instrument sets
    `found`, or computes its results in `figures`.

    A sublayer's weights exist while its `forward` or `backward` runs. An instrument that keeps
    them, or a graph through them, needs that memory. `begin` resets an instrument, so that it can
    walk again.
    """

    kept: TokenMask | None = None
    """The tokens of this walk that are text and not padding; None if all are. Averages over tokens
    count these only. The walk sets it before `begin`.
    """

    found: Any
    """The results so far."""

    @property
    def looks_back(self) -> bool:
        """Whether the instrument needs the way back, and so a loss."""
        kind = type(self)
        methods = (kind.backward, kind.head, kind.embedding)
        return methods != (Instrument.backward, Instrument.head, Instrument.embedding)

    def begin(self, depth: Depth, x0: TokenRows) -> None:
        """The start of a walk: the depth and X_0."""

    def forward(self, at: StepContext) -> None:
        """Segment k on the way down, k = 0, 1, ..."""

    def head(self, model: Model, at: Turn) -> None:
        """The end of the depth, in a walk with a loss."""

    def backward(self, at: StepContextBack) -> None:
        """Segment k on the way back, k = K - 1, ..., 0, in a walk with a loss."""

    def embedding(self, model: Model, tokens: Tensor, p: TokenRows) -> None:
        """The start of the depth on the way back, in a walk with a loss: `p` = dL/dX_0."""

    def figures(self) -> Any:
        """The results, by default `found`. May raise ConfigError or SolveError if there are
        none.
        """
        return self.found


class States(Instrument):
    """A figure of X_0 and of X at the end of each segment: `figure(X, kept)`, by default X
    itself.
    """

    def __init__(self, figure: Callable[[Tensor, Tensor | None], Any] = lambda x, kept: x):
        self._figure = figure

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self.found = [self._figure(x0, self.kept)]

    def forward(self, at: StepContext) -> None:
        self.found.append(self._figure(at.y, self.kept))


class Attempt(Instrument):
    """Another instrument that may not apply to this model. Then `missing[name]` says why, and
    `figures` gives None. If there is a reason already, it measures nothing. By default `missing`
    is a dictionary of its own.
    """

    def __init__(
        self,
        instrument: Instrument,
        missing: dict[str, str] | None = None,
        name: str = "instrument",
    ):
        self.instrument = instrument
        self.missing = {} if missing is None else missing
        self.name = name
        self._figures: list[Any] = []

    @property
    def looks_back(self) -> bool:
        return self.instrument.looks_back

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self.instrument.kept = self.kept
        self._figures = []
        self._try("begin", depth, x0)

    def forward(self, at: StepContext) -> None:
        self._try("forward", at)

    def head(self, model: Model, at: Turn) -> None:
        self._try("head", model, at)

    def backward(self, at: StepContextBack) -> None:
        self._try("backward", at)

    def embedding(self, model: Model, tokens: Tensor, p: Tensor) -> None:
        self._try("embedding", model, tokens, p)

    def figures(self) -> Any:
        """Those of the instrument, computed once: some instruments add to their readings then."""
        if not self._figures:
            self._figures.append(self._try("figures"))
        return self._figures[0]

    def leave_out(self, why: str) -> None:
        """Gives a reason to measure nothing."""
        self.missing[self.name] = why

    def _try(self, what: str, *arguments: Any) -> Any:
        return tried(self.missing, self.name, getattr(self.instrument, what), *arguments)
