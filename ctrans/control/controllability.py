"""Controllability to first order: which losses of tokens, and which logits, the controls can move
independently of each other.

The linearised flow is dX_{k+1} = J_k dX_k + B_k du_k, with J_k = dX_{k+1}/dX_k. Its Gramian of the
end state X_K is W = sum_k J(K, k+1) B_k B_k' J(K, k+1)', J(K, k+1) = J_{K-1} ... J_{k+1}. Controls
of least squares sum_k |du_k|^2 = c reach the ellipsoid {W^(1/2) z : |z|^2 <= c}.

The controls of segment k are

- its velocity, free in each entry of the state: B_k = h_k I, behind a norm around the state h_k
  times the norm's Jacobian
- its sublayer's weights, shared by all tokens: B_k = dX_{k+1}/dtheta_k

W is too large to form: its side is tokens times width. For a few directions c_i at X_K the matrix
G_ij = c_i'W c_j = sum_k <B_k' P_i, B_k' P_j> needs one costate P_i for each, with P_i(K) = c_i.

If c_i is the gradient of y_i by X_K, G is the Gramian of the outputs y_i. By weights it is the
neural tangent kernel of y_i over the depth's weights (Jacot, Gabriel, Hongler 2018). It counts
neither embedding nor head, and a weight that several sublayers share as one of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils import parametrize

from ctrans.base.as_found import leaving_as_found
from ctrans.base.shapes import TokenRows
from ctrans.control.admissible import ROUNDING
from ctrans.dynamics.depth import Depth, check_count, spread
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.backward.parameter_gradients import requiring_gradients, used_weights
from ctrans.measure.walk import Model, SegmentCallback, check_targets, own_loss, states_of
from ctrans.model.gpt import counted
from solvers import ConfigError, SolveError
from solvers.run import finite

CONTROLS = ("weights", "free velocities")
DIRECTIONS = 8
"""Number of tokens, and of classes, that are looked at."""
COARSEST = 1e-6
"""The largest machine epsilon of states of which ranks are known."""
AT_ONCE = 2**15
"""Entries of each gradient that are multiplied at once in float64, so that they stay in a cache."""
GRADIENTS = 2**26
"""Entries of gradients by weights that are in memory at once: 256 MB in float32."""

Directions = Float[Tensor, "directions *state"]
"""Some directions at a state, or costates."""
PerSegment = Float[Tensor, "segments directions directions"]
"""A Gramian for each segment, in float64."""


@dataclass(frozen=True, eq=False)
class Gramian:
    """G = C'W C over some directions C at X_K: the sum of one part for each segment, in float64.

    An eigenvalue counts as zero up to `rounding` of the largest. Gradients that are exact to a
    relative error e leave eigenvalues of about e^2.
    """

    parts: PerSegment
    rounding: float

    @property
    def matrix(self) -> Float[Tensor, "directions directions"]:
        """G."""
        return self.parts.sum(0)

    @cached_property
    def eigenvalues(self) -> Float[Tensor, " directions"]:
        """In ascending order."""
        values: Tensor = torch.linalg.eigvalsh(self.matrix)
        return values

    @property
    def rank(self) -> int:
        """How many combinations of the directions the controls can move."""
        values = self.eigenvalues
        zero = len(values) * self.rounding * values.abs().max()
        return int((values > zero).sum())

    @property
    def shares(self) -> list[float]:
        """tr G_k/tr G of each segment k; 0 if G is 0."""
        traces = self.parts.diagonal(dim1=-2, dim2=-1).sum(-1)
        total = traces.sum()
        return (traces / torch.where(total == 0, 1.0, total)).tolist()


class Gramians(NamedTuple):
    """The Gramian of each kind of controls over the same directions."""

    weights: Gramian
    velocities: Gramian


@torch.no_grad()
@leaving_as_found
def gramians(
    depth: Depth,
    x0: TokenRows,
    directions: Mapping[str, Directions],
    *,
    progress: SegmentCallback | None = None,
) -> dict[str, Gramians]:
    """sum_k <B_k' P_i, B_k' P_j> of each family of directions, by weights and by free velocities.

    - `x0`: X_0 = the start of the trajectory of the discrete model
    - `directions`: families of directions c_i at X_K, each (directions, *shape of X_K)
    - `progress(k)`: called after each segment

    A segment takes one evaluation with a gradient for each direction of a family. Gradients by
    weights need `GRADIENTS` entries of memory, or those of one weight tensor for all directions.
    """
    return _gramians(depth, states_of(depth, x0), directions, progress)


def _gramians(
    depth: Depth,
    states: Sequence[Tensor],
    directions: Mapping[str, Directions],
    progress: SegmentCallback | None = None,
) -> dict[str, Gramians]:
    """`gramians` along known states."""
    costates = dict(directions)
    by_weights: dict[str, list[Tensor]] = {name: [] for name in directions}
    by_velocity: dict[str, list[Tensor]] = {name: [] for name in directions}
    for k in reversed(range(len(depth.sublayers))):
        sublayer = depth.sublayers[k]
        for name, costate in costates.items():
            before, of_velocity, of_weights = _step_back(
                sublayer, depth.lengths[k], states[k], costate
            )
            if not finite(before):
                raise SolveError(
                    f"a costate became non-finite in segment {k}: take a smaller dt, smaller"
                    " weights or a wider dtype"
                )
            costates[name] = before
            by_velocity[name].insert(0, of_velocity)
            by_weights[name].insert(0, of_weights)
        if progress is not None:
            progress(k)
    rounding = _rounding_of(states[-1].dtype)
    return {
        name: Gramians(
            Gramian(torch.stack(by_weights[name]), rounding),
            Gramian(torch.stack(by_velocity[name]), rounding),
        )
        for name in directions
    }


def _rounding_of(dtype: torch.dtype) -> float:
    """The eigenvalues' rounding: the square of the gradients', at least that of float64."""
    of_gradients = ROUNDING * torch.finfo(dtype).eps
    return max(of_gradients**2, ROUNDING * torch.finfo(torch.float64).eps)


def _step_back(
    sublayer: Sublayer, h: float, x: Tensor, costates: Directions
) -> tuple[Directions, Tensor, Tensor]:
    """J_k'P_i, and the Gram matrices of B_k'P_i of the velocity and of the weights."""
    with parametrize.cached():  # theta(s) is one tensor inside
        weights = list(used_weights(sublayer).values())
        x = x.detach().requires_grad_()
        with requiring_gradients(weights), torch.enable_grad():
            entered = sublayer.enter(x)
            # adding 0 makes r a tensor of its own, also where the map returns its input
            r = sublayer(entered) + 0.0
            r.requires_grad_()
            y = sublayer.moved(entered, r, h)
            before, by_velocity = _pulled(y, [x, r], costates)
            of_weights = torch.zeros(len(costates), len(costates)).to(y.device, torch.float64)
            for group in _groups(weights, GRADIENTS // len(costates)):
                for gradients in _pulled(y, group, costates):
                    of_weights += _gram(gradients)
    return torch.stack(before), _gram(by_velocity), of_weights


def _groups(weights: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """The weights in groups of at most `most` entries, or of one weight."""
    group: list[Tensor] = []
    for weight in weights:
        entries = sum(other.numel() for other in group) + weight.numel()
        if group and entries > most:
            yield group
            group = []
        group.append(weight)
    if group:
        yield group


def _pulled(y: Tensor, inputs: Sequence[Tensor], costates: Directions) -> list[tuple[Tensor, ...]]:
    """(dy/dx)'P_i of each input x: for each of them, one for each costate."""
    by_costate = [
        torch.autograd.grad(y, inputs, p, retain_graph=True, materialize_grads=True)
        for p in costates
    ]
    return list(zip(*by_costate, strict=True))


@torch.no_grad()
def _gram(vectors: Sequence[Tensor]) -> Float[Tensor, "directions directions"]:
    """<v_i, v_j> in float64."""
    size = len(vectors)
    gram = torch.zeros(size, size, dtype=torch.float64, device=vectors[0].device)
    for parts in zip(*(v.flatten().split(AT_ONCE) for v in vectors), strict=True):
        exact = torch.stack(parts).double()
        gram.addmm_(exact, exact.mT)
    return gram


@dataclass(frozen=True, eq=False)
class Controllability:
    """The Gramians of a model over losses of tokens and over logits of one token.

    - `tokens`: c_i is the gradient of the loss of token `places[i]`, in nats, by X_K
    - `classes`: c_i is the gradient of logit `labels[i]` minus the mean of all logits, at the last
      token with a target

    `places` counts the tokens of all sequences in a row. `labels` are the target's class and those
    with the largest logits.
    """

    tokens: Gramians
    classes: Gramians
    places: tuple[int, ...]
    labels: tuple[int, ...]


@torch.no_grad()
@leaving_as_found
def controllability(
    model: Model,
    tokens: Tensor,
    targets: Tensor,
    *,
    directions: int = DIRECTIONS,
    progress: SegmentCallback | None = None,
) -> Controllability:
    """G_ij = c_i'W c_j for the losses of some tokens and for some logits of one token.

    - `directions`: the largest number of tokens, which are spread evenly, and of classes
    - `progress(k)`: called after each segment

    Raises ConfigError for targets that do not fit, for a model whose loss is no cross-entropy of
    logits, and for states of a dtype that is coarser than float32. Raises SolveError if a state or
    a costate is not finite.
    """
    check_count("directions", directions)
    check_targets(model, tokens, targets)
    if own_loss(model) is not None:
        raise ConfigError(
            "controllability needs a loss for each token, and this model has another loss than the"
            " cross-entropy of logits"
        )
    states = states_of(model.depth, model.embed(tokens))
    dtype = states[-1].dtype
    if torch.finfo(dtype).eps > COARSEST:
        raise ConfigError(
            f"controllability in {dtype}: its rounding would decide the ranks, so give float32 or"
            " float64"
        )
    if not finite(states[-1]):
        raise SolveError("the hidden state is not finite, so its controllability is undefined")
    outputs = _Outputs(model, states[-1], counted(targets).flatten())
    families = {
        "tokens": outputs.of_tokens(directions),
        "classes": outputs.of_classes(directions),
    }
    directions_by_family = {name: family.directions for name, family in families.items()}
    found = _gramians(model.depth, states, directions_by_family, progress)
    return Controllability(
        tokens=found["tokens"],
        classes=found["classes"],
        places=families["tokens"].names,
        labels=families["classes"].names,
    )


class _Family(NamedTuple):
    """Directions at X_K, and the numbers of the tokens or classes that they are of."""

    directions: Directions
    names: tuple[int, ...]


class _Outputs:
    """The logits of all tokens as functions of X_K, with their graph."""

    def __init__(self, model: Model, x: Tensor, targets: Int[Tensor, " rows"]):
        with torch.enable_grad():
            self._x = x.detach().requires_grad_()
            self._logits = model.head(self._x).flatten(0, -2)
        if len(self._logits) != len(targets):
            raise ConfigError(
                f"the head gives {len(self._logits)} rows of logits for {len(targets)} targets:"
                " take a model with logits of every token"
            )
        self._targets = targets
        self._rows = (targets >= 0).nonzero().flatten().tolist()

    def of_tokens(self, count: int) -> _Family:
        """The gradients of the losses of up to `count` tokens."""
        rows = [self._rows[i] for i in spread(len(self._rows), count)]
        with torch.enable_grad():
            losses = F.cross_entropy(self._logits[rows], self._targets[rows], reduction="none")
        return _Family(self._gradients(losses), tuple(rows))

    def of_classes(self, count: int) -> _Family:
        """The gradients of up to `count` logits of the last token minus their mean. One class is
        left out, because the sum of all is 0.
        """
        row = self._rows[-1]
        ranked = self._logits[row].detach().clone()
        ranked[self._targets[row]] = torch.inf
        labels = ranked.topk(min(count, len(ranked) - 1)).indices
        with torch.enable_grad():
            logits = self._logits[row]
            outputs = (logits - logits.mean())[labels]
        return _Family(self._gradients(outputs), tuple(labels.tolist()))

    def _gradients(self, outputs: Float[Tensor, " directions"]) -> Directions:
        (gradients,) = _pulled(outputs, [self._x], torch.eye(len(outputs)).to(outputs))
        return torch.stack(gradients)
