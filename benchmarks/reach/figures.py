"""The early figures of H4 in PROTOCOL.md: of the initial weights, and of probes of at most 60
steps.

Each is a function of (task, fields of the architecture, seed). A figure that a model lacks is nan.
Probes train as the study does, with its batch, weight decay and clipping, but at their own learning
rates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from benchmarks.prediction.hessian import hessian_edges
from benchmarks.prediction.predictors import descent
from benchmarks.prediction.scores import gradient_scores, naswot, synflow
from benchmarks.reach.cases import SETTINGS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.forward.moments import moments
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.training.data import Data
from ctrans.training.settings import TrainConfig
from solvers import ConfigError, SolveError

WARM_UP = 10
"""Steps in which a probe's rate grows to its peak."""
RAMP = (1e-4, 1.0, 60)
"""Smallest and largest rate of the ramp, and its steps: it grows by the same factor each step."""
AROUND_CIRCLE = 0.1
"""An eigenvalue is near the unit circle if its modulus is within this of 1."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at its initial weights, with the data of its task."""

    config: GPTConfig
    data: Data
    seed: int

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.data.batch(step, 0, batch=SETTINGS["batch"], seed=self.seed)

    def probe(self, rates: list[float], look: Callable[[GPT, float, Tensor, Tensor], None]) -> GPT:
        """Trains one step at each rate, and calls `look(model, loss, tokens, the weights before the
        step)` after each.
        """
        model = GPT(self.config, seed=self.seed)
        optimiser = TrainConfig(**{**SETTINGS, "warmup": 0}).make_optimiser(model.parameters())
        for step, rate in enumerate(rates):
            for group in optimiser.param_groups:
                group["lr"] = rate
            tokens, targets = self.batch(step)
            _, loss = model(tokens, targets)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = body(model)
            if not math.isfinite(loss.item()):
                break
            optimiser.step()
            look(model, loss.item(), tokens, before)
        return model


def body(model: GPT) -> Tensor:
    """All matrices of the depth as one vector."""
    return torch.cat(
        [weight.detach().flatten() for weight in model.depth.parameters() if weight.dim() >= 2]
    )


def constant(rate: float, steps: int) -> list[float]:
    """A probe's rates: a linear warm-up, then the peak."""
    return [rate * min(1.0, (step + 1) / WARM_UP) for step in range(steps)]


def length(case: Case) -> float:
    """T = 2 D dt."""
    return case.config.segments * case.config.dt


def norm_behind(case: Case) -> float:
    """1 if a norm stands behind the maps, else 0."""
    placement = PLACEMENTS.get(case.config.placement)
    return math.nan if placement is None else float(placement.output_norm)


def kappa(case: Case) -> float:
    """The share of the last state that is the same for all tokens, after ten steps at 0.03."""
    model = case.probe(constant(0.03, 10), lambda *_: None)
    with torch.no_grad():
        return moments(model.depth(model.embed(case.batch(10)[0]))).common


def ramp(case: Case) -> tuple[list[float], list[float]]:
    """Rates of a ramp, and its losses smoothed over five steps."""
    low, high, steps = RAMP
    rates = [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]
    losses: list[float] = []
    case.probe(rates, lambda model, loss, tokens, before: losses.append(loss))
    return rates, [statistics.fmean(losses[max(0, k - 2) : k + 3]) for k in range(len(losses))]


def steepest_fall(case: Case) -> float:
    """The rate at which a ramp's loss falls the most in a step: lr_find's rule."""
    rates, smooth = ramp(case)
    falls = [smooth[k + 1] - smooth[k] for k in range(len(smooth) - 1)]
    return rates[min(range(len(falls)), key=falls.__getitem__)] if falls else math.nan


def valley(case: Case) -> float:
    """fastai's rule in our reading: the middle of the longest run of ever lower losses of a ramp,
    in steps.
    """
    rates, smooth = ramp(case)
    longest: list[list[int]] = []
    for k, loss in enumerate(smooth):
        longest.append(
            [*max((run for run in longest if smooth[run[-1]] > loss), key=len, default=[]), k]
        )
    best = max(longest, key=len)
    return rates[(best[0] + best[-1]) // 2]


def score(name: str) -> Callable[[Case], float]:
    """A score of architecture search that needs no training."""
    return lambda case: gradient_scores(GPT(case.config, seed=case.seed), *case.batch(0))[name]


def share_of_others(case: Case) -> float:
    """The share of the last logits' squared size that other tokens explain, after 40 steps at 0.03.

    It is E|l - l'|^2/2 over E|l|^2. l are the centred logits of the last token with an answer, l'
    those with the same token and the earlier tokens of another row.
    """
    model = case.probe(constant(10**-1.5, 40), lambda *_: None)
    tokens, targets = case.batch(40)
    last = int((targets[0] != -1).nonzero()[-1])
    other = tokens[:, : last + 1].roll(1, 0).clone()
    other[:, last] = tokens[:, last]
    with torch.no_grad():
        here, there = (model(x)[0][:, -1] for x in (tokens[:, : last + 1], other))
    here, there = (x - x.mean(-1, keepdim=True) for x in (here, there))
    return float((here - there).square().sum() / 2 / here.square().sum())


def coherence(case: Case) -> float:
    """mean |update|/rate over the matrices of the depth, at step 40 at 0.01."""
    last: list[float] = []
    case.probe(
        constant(0.01, 40),
        lambda model, loss, tokens, before: last.append(float((body(model) - before).abs().mean())),
    )
    return last[-1] / 0.01


def adam_edge(case: Case) -> float:
    """38 over the largest eigenvalue of Adam's preconditioned Hessian at the initial weights."""
    return 38 / hessian_edges(GPT(case.config, seed=case.seed).double(), *case.batch(0))[1]


def critical_rate(case: Case) -> float:
    """The smallest rate at which a first step of Adam no longer lowers the loss of its batch."""
    return descent(GPT(case.config, seed=case.seed).double(), *case.batch(0))


def near_the_circle(case: Case) -> float:
    """The mean over segments of the share of eigenvalues of a whitened linear fit X_k to X_(k+1)
    near the unit circle.

    Our reading of RKSP's abstract (arXiv 2602.22988): X_k is centred over tokens and whitened by
    its own covariance, and so is X_(k+1) by that of X_k.
    """
    model = GPT(case.config, seed=case.seed).double()
    with torch.no_grad():
        states = [x.flatten(0, -2) for x in model.trajectory(case.batch(0)[0]).states]
    shares = []
    for before, after in itertools.pairwise(states):
        before, after = before - before.mean(0), after - after.mean(0)
        values, vectors = torch.linalg.eigh(before.mT @ before / len(before))
        kept = values > 1e-10 * values[-1]
        whiten = vectors[:, kept] / values[kept].sqrt()
        moduli = torch.linalg.eigvals(
            torch.linalg.lstsq(before @ whiten, after @ whiten).solution
        ).abs()
        shares.append(float(((moduli - 1).abs() < AROUND_CIRCLE).double().mean()))
    return statistics.fmean(shares)


FIGURES: Mapping[str, Callable[[Case], float]] = {
    "T": length,
    "norm behind": norm_behind,
    "kappa": kappa,
    "lr_find": steepest_fall,
    "share of others": share_of_others,
    "coherence": coherence,
    "38/sharpness": adam_edge,
    "critical rate": critical_rate,
    "RKSP": near_the_circle,
    "fastai's valley": valley,
    **{name: score(name) for name in ("SNIP", "GradNorm")},
    "SynFlow": lambda case: synflow(GPT(case.config, seed=case.seed).double()),
    "NASWOT": lambda case: naswot(GPT(case.config, seed=case.seed), case.batch(0)[0]),
}
"""The figures, by their names in tables. The median of the placement needs the outcomes: `report`.
"""


def figures(case: Case, names: Iterable[str]) -> dict[str, float]:
    """These figures of a case."""
    found = {}
    for name in names:
        try:
            found[name] = FIGURES[name](case)
        except (ConfigError, SolveError):  # it says nothing of this model
            found[name] = math.nan
    return found
