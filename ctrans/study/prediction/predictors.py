"""Everything that is asked of a model's initial weights: figures by name, larger or smaller, of which a predictor is made."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from typing import Any

import torch
from torch import Tensor

from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.stability.forward.moments import MomentsByDepth
from ctrans.stability.screening.screen import EFFORTS, screen
from ctrans.study.prediction.hessian import hessian_edges
from ctrans.study.prediction.scores import gradient_scores, naswot, synflow
from ctrans.training.data import Data
from ctrans.walk import walk
from solvers import ConfigError, SolveError

EFFORT = dataclasses.replace(EFFORTS["quick"], tokens=64, curvature=True, lanczos=24)
SEQUENCES = 8
ETA = 1e-3
"""The rate of the one step whose effect on the function is measured."""
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
    """All figures of the architecture at its initial weights, in float64, on the first batch; nan for what it has not.

    The screening's quantities by their names; `Hessian` and `Adam Hessian`, lambda_max (stable below 2/eta and 38/eta); `gradient
    spread`, the deviation over sublayers of log |dL/dW_k|; `growth`, log10 of rms X_D/rms X_0; `response`, |df|/|f| of one Adam step at
    rate 1e-3; `Euler`, the largest |dv_k/dX| dt, whose limit is 2; and the baselines.
    """
    model = GPT(config, seed=seed).double()
    tokens, targets = data.batch(0, 0, batch=SEQUENCES, seed=seed)
    found: dict[str, float] = {
        "blocks": float(config.depth),
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
    }
    found |= _screened(model, tokens, targets)
    found["Hessian"], found["Adam Hessian"] = _tried(lambda: hessian_edges(model, tokens, targets), (math.nan, math.nan))
    found["growth"] = _tried(lambda: _growth(model, tokens), math.nan)
    found["response"] = _tried(lambda: response(model, tokens, targets, ETA), math.nan)
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
    found = {name: value for finding in screening.findings.values() for name, value in finding.quantities.items()}
    backward = screening.findings["backward"].result
    if backward is not None:
        sizes = [each.value for each in backward.sensitivity.sublayers if each.value is not None]
        found["Euler"] = max(sizes, default=math.nan) * model.config.dt
        if backward.gradients is not None:
            totals = [layer.total for layer in backward.gradients.sublayers if layer.total > 0]
            found["gradient spread"] = statistics.pstdev(map(math.log, totals)) if totals else math.nan
    return found


def _growth(model: GPT, tokens: Tensor) -> float:
    sizes = [each.rms for each in walk(model, tokens, instruments=[MomentsByDepth()])[0]]
    return math.log10(sizes[-1] / sizes[0])


def response(model: GPT, tokens: Tensor, targets: Tensor, eta: float) -> float:
    """|f(W + dW) - f(W)|/|f(W)|, f the logits and dW Adam's first step at rate eta, -eta times the gradient's sign."""
    moved = copy.deepcopy(model)
    logits, loss = moved(tokens, targets)
    weights = [parameter for parameter in moved.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(eta * gradient.sign())
        after, _ = moved(tokens)
        return float((after - logits).norm() / logits.norm())
