"""Section 12: where two models part: shares of the difference of their losses, and rounding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from ctrans.base.draw import Draw
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.examine.comparison.compare import compare
from ctrans.examine.comparison.rounding_noise import Draws, RoundingNoise
from ctrans.model.gpt import GPT
from ctrans.theory.random_models import (
    describe_model,
    random_model,
    random_text,
    smooth_model,
)
from ctrans.theory.statement import Trial, Trials, at_most, dense_jacobian, equal, statement

SECTION = 12

VectorMap = Callable[[Tensor], Tensor]
RUNS = 4000
"""Runs with random rounding, whose mean square is known to about 5%."""
UNIT = 1e-5
WIDTH = 3
SIZES = (2e-4, 1e-4)
"""Changes of the weights, from which an order is measured."""


def _changed(draw: Draw, model: GPT, size: float) -> GPT:
    """A copy whose weights all differ, by that share of their size."""
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.add_(size * weight.square().mean().sqrt() * draw.normal(*weight.shape))
    return other


@statement(
    "parting-shares",
    "ctrans",
    "the shares G_{k+1}(Psi_k(X_k)) - G_{k+1}(X_{k+1}) of all parts add up to L_B - L_A, with G_k"
    " the loss of model B from state k on and X_k the states of model A",
    1e-9,
    0.05,
)
def shares_of_parts(draw: Draw) -> Trial:
    """The sum of the shares of `ctrans.compare` against the losses of the two models' own passes,
    for any two models of one shape.
    """
    model = random_model(draw, draw.choice(PLACEMENTS))
    other = _changed(draw, model, draw.log_uniform(-4, 1))
    tokens, targets = random_text(draw), random_text(draw)
    found = compare(model, other, tokens, targets)
    loss_a, loss_b = (float(each(tokens, targets)[1]) for each in (model, other))
    return equal(
        sum(part.share for part in found.parts),
        loss_b - loss_a,
        f"the sum of shares, {describe_model(model)}",
        max(abs(loss_a), abs(loss_b)),
    )


@statement(
    "parting-first-order",
    "ctrans",
    "<P_{k+1}, e_k> differs from the share of sublayer k, and sum_k J(K, k+1) e_k from X'_K - X_K,"
    " by second order in the defects e_k = Psi_k(X_k) - X_{k+1}, P the costate of model B",
    0.15,
    0.02,
)
def order_of_shares(draw: Draw) -> Trials:
    """|slope - 2| of the log of both errors against the log of the change of all weights: of |share
    - <P, e>|, summed over sublayers, and of the states' difference.
    """
    model = smooth_model(draw, 2)
    tokens, targets = random_text(draw), random_text(draw)
    row = draw.normal(model.config.width)
    seed = draw.seed()
    of_shares, of_states = [], []
    for size in SIZES:
        other = _changed(Draw(seed), model, size)
        found = compare(model, other, tokens, targets)
        of_shares.append(sum(abs(part.share - part.first_order) for part in found.parts[:-1]))
        of_states.append(abs(_error_of_states(model, other, row, tokens)))
    trials = []
    for name, errors in (("shares", of_shares), ("states", of_states)):
        slope = math.log(errors[0] / errors[1]) / math.log(SIZES[0] / SIZES[1])
        case = f"the error of first-order {name} ~ change^{slope:.3f}"
        trials.append(Trial(abs(slope - 2), case))
    return trials


def _error_of_states(first: GPT, second: GPT, row: Tensor, tokens: Tensor) -> float:
    """|<row, X'_K - X_K - sum_k J(K, k+1) e_k>|, J of the second model at its own states."""
    x = first.embed(tokens)
    others = [second.embed(tokens).requires_grad_()]
    defects = [others[0].detach() - x]
    lengths = first.depth.lengths
    steps = zip(first.depth.sublayers, second.depth.sublayers, lengths, strict=True)
    with torch.enable_grad():
        for own, theirs, dt in steps:
            following = own.step(x, dt)
            defects.append(theirs.step(x, dt) - following)
            x = following
            others.append(theirs.step(others[-1], dt))
        costates = torch.autograd.grad((others[-1] * row).sum(), others)
    pairs = zip(costates, defects, strict=True)
    predicted = torch.stack([(p * e).sum() for p, e in pairs]).sum()
    return float(((others[-1].detach() - x) * row).sum() - predicted)


@statement(
    "parting-remainder",
    "ctrans",
    "|share - <P_{k+1}, e_k>| <= M |e_k| (|e_k|/2 + |Psi_k(X'_k) - Psi_k(X_k)|), X'_k the states of"
    " B and M a bound of the second derivative of G_{k+1} where they are; M = |W T|^2/2 for a"
    " linear tail T, head W and the cross-entropy",
)
def remainder(draw: Draw) -> Trials:
    """The bound for linear sublayers x -> x + A x of one token, with a head W and the
    cross-entropy. Where G is quadratic, and what is inherited has the direction of e, it is an
    equality.
    """
    width = 2 + draw.integer(6)
    depth = 1 + draw.integer(4)
    eye = torch.eye(width, dtype=torch.float64)
    first = [eye + 0.3 * draw.normal(width, width) for _ in range(depth)]
    size = draw.log_uniform(-3, 0)
    second = [step + size * draw.normal(width, width) for step in first]
    head = draw.log_uniform(-1, 1) * draw.normal(5, width)
    target = torch.tensor(draw.integer(5))
    x = other = draw.normal(width)
    trials = []
    for k in range(depth):
        tail = head
        for step in reversed(second[k + 1 :]):
            tail = tail @ step
        own = first[k] @ x
        theirs = second[k] @ x
        of_other = second[k] @ other
        defect = theirs - own
        inherited = of_other - theirs
        share = cross_entropy(tail @ theirs, target) - cross_entropy(tail @ own, target)
        costate = tail.T @ ((tail @ of_other).softmax(0) - _unit(5, int(target)))
        largest = float(torch.linalg.matrix_norm(tail, 2)) ** 2 / 2
        trials.append(
            at_most(
                (share - costate @ defect).abs(),
                largest * defect.norm() * (defect.norm() / 2 + inherited.norm()) + 1e-13,
                f"the remainder of sublayer {k} of {depth}, width {width}",
            )
        )
        x, other = own, of_other
    return [*trials, _remainder_attained(draw)]


def _remainder_attained(draw: Draw) -> Trial:
    """G(x) = M |x|^2/2 on the line: P = M X'; the defect has the sign of what is inherited."""
    curvature = draw.log_uniform(-1, 1)
    own = float(draw.normal(1))
    defect, inherited = draw.uniform(0.1, 2), draw.uniform(0.1, 2)
    theirs = own + defect
    share = curvature * (theirs**2 - own**2) / 2
    costate = curvature * (theirs + inherited)
    return equal(
        abs(share - costate * defect),
        curvature * defect * (defect / 2 + inherited),
        "the remainder of a quadratic loss",
    )


def _unit(size: int, index: int) -> Float[Tensor, " size"]:
    return torch.nn.functional.one_hot(torch.tensor(index), size).double()


@statement(
    "parting-rounding",
    "ctrans, on Vignes, 1974",
    "if every result y_i becomes y_i (1 + u z), z independent and uniform in [-1, 1], the output"
    " moves by a mean square of u^2/3 sum_i |J_i diag(y_i)|_F^2, to leading order",
    0.15,
    0.1,
)
def rounding_of_chains(draw: Draw) -> Trial:
    """The mean square of runs with `RoundingNoise` against dense derivatives."""
    operations, x = _chain(draw)
    moved = _moved(operations, x)
    square = sum(float((j * y).square().sum()) for y, j in _derivatives(operations, x))
    return equal(
        moved.square().sum(1).mean(),
        UNIT**2 / 3 * square,
        f"mean square, {len(operations)} operations",
    )


@statement(
    "parting-rounding-bound",
    "ctrans, on Vignes, 1974",
    "and by at most u sum_i |J_i| |y_i| to leading order; rounding to the nearest number is such a"
    " change with |z| <= 1/(1 + u)",
    1e-3,
    0.1,
)
def largest_rounding(draw: Draw) -> Trials:
    """Runs with `RoundingNoise` against the bound, which one product reaches to 1%; and rounding of
    dtypes against theirs, which 1 + u reaches.
    """
    operations, x = _chain(draw)
    largest = _moved(operations, x).abs().amax(0)
    bound = UNIT * sum(j.abs() @ y.abs() for y, j in _derivatives(operations, x))
    of_product = _moved([torch.neg, lambda y: 2 * y], x).abs().amax(0)
    unit_of = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
    dtype = draw.choice(unit_of)
    u = unit_of[dtype]
    halfway = torch.full((1,), 1 + u, dtype=torch.float64)
    numbers = torch.cat([(1 + draw.unit(1000)) * 2.0 ** draw.integer(5), halfway])
    rounded = (numbers.to(dtype).double() - numbers).abs() / numbers
    return [
        at_most((largest / bound).max(), 1.0, f"the largest, {len(operations)} operations"),
        at_most(0.99, (of_product / (2 * UNIT * x.abs())).max(), "99% against that of a product"),
        equal(rounded.max(), u / (1 + u), f"rounding to {dtype}"),
    ]


def _chain(draw: Draw) -> tuple[list[VectorMap], Float[Tensor, " width"]]:
    """Random linear maps, each with a tanh behind it, and what they read."""
    operations: list[VectorMap] = []
    for _ in range(1 + draw.integer(3)):
        operations += [partial(torch.matmul, draw.normal(WIDTH, WIDTH)), torch.tanh]
    return operations, draw.normal(WIDTH)


def _moved(operations: Sequence[VectorMap], x: Tensor) -> Float[Tensor, "runs width"]:
    """What random rounding changes of the chain's output, in many runs."""
    exact = _output(operations, x)
    columns = x.unsqueeze(1).expand(WIDTH, RUNS)
    with RoundingNoise(UNIT, Draws()):
        y = _output(operations, columns)
    return y.t() - exact


def _output(operations: Sequence[VectorMap], x: Tensor) -> Tensor:
    for operation in operations:
        x = operation(x)
    return x


def _derivatives(operations: Sequence[VectorMap], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each result of the chain, and the dense derivative of the output by it."""
    for done in range(1, len(operations) + 1):
        y = _output(operations[:done], x)
        yield y, dense_jacobian(partial(_output, operations[done:]), y)
