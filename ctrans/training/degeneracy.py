"""Degeneracy seen in a training: sup |v|, H and the loss by step, with and without an output norm
(`ctrans hjb-check --train`).

Cross-entropy has no least point where the targets can be separated: it tends to 0 only as the
logits tend to infinity. Gradient descent on L = log(1 + exp(-w)) has w + exp(w) = t + constant in
the limit of small rates, so w grows like log t. Here logits grow through velocities alone. Without
an output norm their size is free, and theory expects sup |v| to grow like log t. Behind one it is
at most sqrt(d) max|gamma| + |beta| (Kan, eq. 99), so it grows with trained gains only. A squared
error has a least point, at finite velocities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import Scalar, StreamRows, TokenIds
from ctrans.control.costate import Costate, costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.dynamics.norm import SphereNorm
from ctrans.dynamics.placement import get_placement
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, next_token_loss
from ctrans.training.growth_by_step import (
    FIRST_GAIN,
    FITTED_DOUBLINGS,
    LAST,
    LOG_FIT,
    POWER,
    POWER_FIT,
    SECOND_GAIN,
    SLOPE,
    STEADY,
    growth_of,
)
from solvers import SolveError, Status

STEPS = 2000
"""The budget before it is doubled twice. At these the six trainings took a minute on two cores."""
DOUBLINGS = 2
LAST_STEP = STEPS * 2**DOUBLINGS
RATE = 0.1
DECAY = 3e-3
"""Learning rate, and lam of the penalty lam/2 |W|^2 of the trainings with decay."""
ROWS = 8
TOKENS = 4
WIDTH = 16
"""Rows of the task, tokens of a row, and width of the model. There are as many symbols as rows."""
PER_DOUBLING = 4
"""How often a doubling of the steps is measured."""
REPORT_EVERY = 50
"""Steps between two reports of progress."""

SUP = "sup |v| in training"
BOUND = "bound of |v| in training"
HAMILTONIAN = "H in training"
LOSS = "loss in training"
FINAL_LOSS = "loss at the end"

_TOPIC = "Degeneracy in training"
_FITS = f"least squares over the last {FITTED_DOUBLINGS} doublings of t"
_R2 = "1 - squared residuals over those of a constant, 0 for a fit that is no better than one"

MEASURES.add(
    "ctrans hjb-check --train",
    {
        LAST: Measure(
            formula=(
                f"max over tokens and sublayers of |v|, after {LAST_STEP:,} steps: the budget of"
                f" {STEPS:,}, doubled twice"
            ),
            topic=_TOPIC,
            subject="training",
        ),
        FIRST_GAIN: Measure(
            formula=f"s(2N) - s(N) for s = sup |v| and N = {STEPS:,} steps",
            topic=_TOPIC,
            subject="training",
        ),
        SECOND_GAIN: Measure(
            formula=(
                "s(4N) - s(2N): as much as the first for log t, 2^p times as much for t^p, less and"
                " less if s converges"
            ),
            topic=_TOPIC,
            subject="training",
        ),
        SLOPE: Measure(
            formula=f"a of sup |v| = a log t + b, {_FITS}", topic=_TOPIC, subject="training"
        ),
        LOG_FIT: Measure(formula=_R2, topic=_TOPIC, subject="training", decimals=3),
        POWER: Measure(
            formula=f"p of log sup |v| = p log t + c, {_FITS}", topic=_TOPIC, subject="training"
        ),
        POWER_FIT: Measure(
            formula=f"{_R2}, of sup |v| itself", topic=_TOPIC, subject="training", decimals=3
        ),
        FINAL_LOSS: Measure(
            formula="the loss at the last step, without the penalty",
            topic=_TOPIC,
            subject="training",
        ),
        SUP: Measure(
            formula="max over tokens and sublayers of |v|, v what a sublayer adds per depth-time",
            unit="sup |v|",
            scope="size",
            over="step t",
            log=False,
            log_x=True,
        ),
        BOUND: Measure(
            formula="max over sublayers of sqrt(d) max|gamma| + |beta|, of the output norm",
            unit="sup |v|",
            source="Kan, eq. 99",
            scope="size",
            over="step t",
            log_x=True,
            bounds=SUP,
        ),
        HAMILTONIAN: Measure(
            formula="max over sublayers of H(P) = sup -<P, f> at the present gains, P = dL/dX",
            unit="H(P)",
            scope="size",
            over="step t",
            log_x=True,
        ),
        LOSS: Measure(
            formula=(
                "mean over targets of the cross-entropy in nats, or of |logits - one-hot|^2/2;"
                " without the penalty"
            ),
            unit="loss",
            scope="size",
            over="step t",
            log_x=True,
        ),
    },
    picture="hjb-train",
)

SIZES = (
    f"The trainings of --train: one block of width {WIDTH} with LayerNorm, {ROWS} rows of {TOKENS}"
    f" tokens, gradient descent at a rate of {RATE:g} in float64. Embeddings and head are fixed,"
    f" and no norm acts before the head. decay: a penalty {DECAY:g}/2 |W|^2 of all that is trained"
)


def one_hot_error(logits: Float[Tensor, "*batch tokens vocab"], targets: TokenIds) -> Scalar:
    """Mean over targets of |logits - one-hot|^2/2. Its least point has finite logits."""
    wanted = F.one_hot(targets, logits.shape[-1]).to(logits.dtype)
    return (logits - wanted).square().sum(-1).mean() / 2


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": next_token_loss,
    "squared error": one_hot_error,
}


@dataclass(frozen=True, kw_only=True)
class SeparableTraining:
    """A training: the placement, the loss, lam of the penalty lam/2 |W|^2 of all that is trained,
    and whether the gains and offsets of output norms are trained.
    """

    placement: str
    loss: str = "cross-entropy"
    decay: float = 0.0
    trains_gains: bool = True


CASES: dict[str, SeparableTraining] = {
    "pre": SeparableTraining(placement="pre"),
    "pre, decay": SeparableTraining(placement="pre", decay=DECAY),
    "pre, squared error": SeparableTraining(placement="pre", loss="squared error"),
    "peri, gains fixed": SeparableTraining(placement="peri", trains_gains=False),
    "peri": SeparableTraining(placement="peri"),
    "peri, decay": SeparableTraining(placement="peri", decay=DECAY),
}
"""The trainings that are compared, by the name of their lines."""


class Separable(GPT):
    """A GPT of one block whose logits grow through velocities alone: embeddings and head are fixed,
    and no norm acts before the head, where it would take the size of X_T away.
    """

    def __init__(self, case: SeparableTraining, *, seed: int):
        config = GPTConfig(
            vocab_size=ROWS,
            context=TOKENS,
            depth=1,
            width=WIDTH,
            heads=2,
            placement=case.placement,
            tied=False,
            embedding_std=WIDTH**-0.5,
        )
        super().__init__(config, seed=seed)
        self.final_norm = nn.Identity()
        self.case = case
        self.double()

    def terminal_loss(self, x: StreamRows, targets: TokenIds) -> Scalar:
        """L(X_T) of the case."""
        return LOSSES[self.case.loss](self.head(x), targets)

    def trained(self) -> list[nn.Parameter]:
        """The weights of the block, with gains and offsets of output norms where the case says
        so.
        """
        return [
            parameter
            for name, parameter in self.depth.named_parameters()
            if self.case.trains_gains or ".output_norm." not in name
        ]


def separable_task(seed: int) -> tuple[TokenIds, TokenIds]:
    """Rows of random tokens with random targets. Each row begins with another token, so that a
    causal model can tell all prefixes apart.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(ROWS, (ROWS, TOKENS), generator=generator)
    tokens[:, 0] = torch.arange(ROWS)
    targets = torch.randint(ROWS, (ROWS, TOKENS), generator=generator)
    return tokens, targets


def trained(
    case: SeparableTraining,
    *,
    steps: int = STEPS,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[str, float, float]]:
    """Rows (measure, step, figure) of a training by gradient descent at the constant rate `RATE`,
    for four times `steps` steps on all rows at once, in float64.

    A gradient flow at a rate of 1 for the time t is this for t/RATE steps. `progress` is called
    with the number of steps since its last call. Raises SolveError if the loss is not finite.
    """
    tokens, targets = separable_task(seed)
    model = Separable(case, seed=seed)
    descent = torch.optim.SGD(model.trained(), lr=RATE, weight_decay=case.decay)
    last = steps * 2**DOUBLINGS
    looks = set(steps_to_measure(last))
    for step in range(1, last + 1):
        descent.zero_grad()
        loss = model.terminal_loss(model.depth(model.embed(tokens)), targets)
        if not torch.isfinite(loss):
            raise SolveError(f"the loss is not finite at step {step}: {Status.NON_FINITE.value}")
        loss.backward()
        descent.step()
        if step in looks:
            figures = figures_of(model, costate(model, tokens, targets))
            for measure, figure in figures.items():
                yield measure, step, figure
        if progress is not None and step % REPORT_EVERY == 0:
            progress(REPORT_EVERY)


def steps_to_measure(last: int) -> list[int]:
    """`PER_DOUBLING` steps for each doubling, from 1 to the last."""
    doublings = math.floor(math.log2(last) * PER_DOUBLING)
    steps = {round(last * 2 ** (-k / PER_DOUBLING)) for k in range(doublings + 1)}
    return sorted(steps)


def figures_of(model: Separable, discrete: Costate) -> dict[str, float]:
    """sup |v|, its bound and H behind output norms, and the loss."""
    sublayers = list(model.depth.sublayers)
    norms = [sublayer.output_norm for sublayer in sublayers]
    with torch.no_grad():
        sizes = [
            float(sublayer.velocity(x).norm(dim=-1).max())
            for sublayer, (x, _) in zip(sublayers, discrete.starts, strict=True)
        ]
    figures = {SUP: max(sizes)}
    bounds = [velocity_bound(norm) for norm in norms if isinstance(norm, SphereNorm)]
    if bounds:
        figures[BOUND] = max(bounds)
        values = maximum_principle(model.depth, discrete).hamiltonian
        figures[HAMILTONIAN] = max(value for value in values if value is not None)
    figures[LOSS] = discrete.loss
    return figures


def velocity_bound(norm: SphereNorm) -> float:
    """sqrt(d) max|gamma| + |beta|, which no output of the norm exceeds. Kan, eq. 99."""
    radius = math.sqrt(norm.gamma.shape[-1])
    return float(radius * norm.gamma.detach().abs().max() + norm.beta.detach().norm())


def degeneracy(
    *,
    steps: int = STEPS,
    seed: int = 0,
    cases: Mapping[str, SeparableTraining] = CASES,
    progress: Callable[[str, int], None] | None = None,
) -> Measured:
    """sup |v|, H and the loss of small trainings by step, as a table, for `CASES`.

    - `steps`: the budget N, which is doubled twice
    - `progress(name, n)`: called as n steps of a training are done

    Raises SolveError if a training diverges.
    """
    values: list[Value] = []
    missing: dict[str, dict[str, str]] = {}
    for name, case in cases.items():
        report = None
        if progress is not None:
            report = _named(progress, name)
        rows = list(trained(case, steps=steps, seed=seed, progress=report))
        series = [(step, figure) for measure, step, figure in rows if measure == SUP]
        growth = growth_of([step for step, _ in series], [figure for _, figure in series])
        growth[FINAL_LOSS] = rows[-1][2]
        values += [Value(name, measure, figure) for measure, figure in growth.items()]
        values += [Value(name, measure, figure, step=step) for measure, step, figure in rows]
        missing[name] = _missing(case, growth)
    return Measured(
        values=tuple(values),
        missing={name: reasons for name, reasons in missing.items() if reasons},
        answers=(answer(values, steps),),
        notes={"": [SIZES]},
    )


def _named(progress: Callable[[str, int], None], name: str) -> Callable[[int], None]:
    return lambda done: progress(name, done)


def _missing(case: SeparableTraining, growth: Mapping[str, float]) -> dict[str, str]:
    """What was not measured of a training, and why."""
    reasons = {}
    if not get_placement(case.placement).output_norm:
        reasons[BOUND] = f"{case.placement} has no norm at the output"
        reasons[HAMILTONIAN] = (
            f"H(P) is infinite under {case.placement} at every costate that is not 0, unless a"
            " penalty is large enough: ctrans hjb-check --weight-decay decides that"
        )
    if SLOPE not in growth:
        reasons[SLOPE] = (
            f"sup |v| changes by less than {STEADY:g} of its size, so that no law of growth fits"
        )
    return reasons


def answer(values: Sequence[Value], steps: int) -> Answer:
    """What sup |v| was at the budget, and at four times it, by training."""
    last = steps * 2**DOUBLINGS
    of_sup = {
        (value.model, value.step): value.value or 0.0 for value in values if value.measure == SUP
    }
    names = dict.fromkeys(value.model for value in values)
    parts = [f"{name}: {of_sup[name, steps]:.3g}, {of_sup[name, last]:.3g}" for name in names]
    return Answer(
        f"Small trainings had these sup |v| after {steps:,} and {last:,} steps. {'; '.join(parts)}."
    )
