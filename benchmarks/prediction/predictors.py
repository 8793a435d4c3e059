"""Everything that is asked of a model's initial weights: figures by name, larger or smaller, of
which a predictor is made.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from benchmarks.prediction.hessian import hessian_edges
from benchmarks.prediction.scores import gradient_scores, naswot, synflow
from ctrans.examine.screening.screen import EFFORTS, screen
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.training.data import Data
from solvers import ConfigError, SolveError

EFFORT = dataclasses.replace(EFFORTS["quick"], tokens=32, curvature=True, lanczos=16)
SEQUENCES = 4
ETA = 1e-3
"""The rate of the one step whose effect on the function is measured."""
DESCENT = tuple(10 ** (k / 8) for k in range(-40, 9))
"""Rates that `descent` tries, from 1e-5 to 10."""
BASELINES = (
    "blocks",
    "parameters",
    "gradient norm",
    "SNIP",
    "SynFlow",
    "NASWOT",
    "GradNorm",
    "loss after 20 steps",
    "always pre",
)


def predictors(config: GPTConfig, data: Data, seed: int = 0) -> dict[str, float]:
    """All figures of the architecture at its initial weights, in float64, on the first batch; nan
    for what it has not.

    The screening's quantities by their names; `Hessian` and `Adam Hessian`, lambda_max (stable
    below 2/eta and 38/eta); `gradient spread`, the deviation over sublayers of log |dL/dW_k|;
    `response`, |df|/|f| of one Adam step at rate 1e-3; `descent`, the rate at which that step no
    longer lowers the loss of its own batch; `Euler`, the largest |dv_k/dX| dt, whose limit is 2;
    and the baselines.
    """
    model = GPT(config, seed=seed).double()
    tokens, targets = data.batch(0, 0, batch=SEQUENCES, seed=seed)
    found: dict[str, float] = {
        "blocks": float(config.depth),
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
    }
    found |= _screened(model, tokens, targets)
    found["Hessian"], found["Adam Hessian"] = _tried(
        lambda: hessian_edges(model, tokens, targets), (math.nan, math.nan)
    )
    found["response"] = _tried(lambda: response(model, tokens, targets, ETA), math.nan)
    found["descent"] = _tried(lambda: descent(model, tokens, targets), math.nan)
    found |= _tried(lambda: gradient_scores(model, tokens, targets), {})
    found["SynFlow"] = _tried(lambda: synflow(model), math.nan)
    found["NASWOT"] = _tried(lambda: naswot(model, tokens), math.nan)
    return found


def _tried(function: Any, otherwise: Any) -> Any:
    """The function's value; the other where it says that it cannot speak of this model."""
    try:
        return function()
    except (ConfigError, SolveError):
        return otherwise


def _screened(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    screening = screen(model, tokens, targets, EFFORT)
    found = {
        name: value for step in screening.steps.values() for name, value in step.quantities.items()
    }
    backward = screening.steps["backward"].result
    if backward is not None:
        sizes = [each.value for each in backward.sensitivity.sublayers if each.value is not None]
        found["Euler"] = max(sizes, default=math.nan) * model.config.dt
        if backward.gradients is not None:
            totals = [layer.total for layer in backward.gradients.sublayers if layer.total > 0]
            found["gradient spread"] = (
                statistics.pstdev(map(math.log, totals)) if totals else math.nan
            )
    return found


def response(model: GPT, tokens: Tensor, targets: Tensor, eta: float) -> float:
    """|f(W + dW) - f(W)|/|f(W)|, f the logits and dW Adam's first step at rate eta, -eta times the gradient's sign."""
    (before, _), moved = _along_adam(model, tokens, targets)
    after, _ = moved(eta)
    return float((after - before).norm() / before.norm())


def descent(model: GPT, tokens: Tensor, targets: Tensor) -> float:
    """The smallest eta of `DESCENT` with L(W + dW) >= L(W), dW as in `response` and L the loss of
    the same batch; the last if none has.
    """
    (_, before), moved = _along_adam(model, tokens, targets)
    return next((eta for eta in DESCENT if not moved(eta)[1] < before), DESCENT[-1])


def _along_adam(
    model: GPT, tokens: Tensor, targets: Tensor
) -> tuple[tuple[Tensor, float], Callable[[float], tuple[Tensor, float]]]:
    """Logits and loss where the model stands, and after Adam's first step by its rate."""
    own = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    logits, loss = model(tokens, targets)
    gradients = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)

    def moved(eta: float) -> tuple[Tensor, float]:
        weights = {
            name: w.detach() - eta * g.sign()
            for (name, w), g in zip(own.items(), gradients, strict=True)
        }
        with torch.no_grad():
            after, value = functional_call(model, weights, (tokens, targets))
        return after, float(value)

    return (logits.detach(), loss.item()), moved
