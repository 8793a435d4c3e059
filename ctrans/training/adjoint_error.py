"""The error of the adjoint's gradients, estimated once before a training."""

from __future__ import annotations

import dataclasses
import math

import torch

from ctrans.training.data import Data
from ctrans.training.objective import Objective
from solvers import Adjoint, AdjointError, ConfigError, SolveError
from solvers.methods import get_method

LARGEST_ERROR = 0.1
"""The largest error of the gradient that a training accepts, as a share of it: above it the
optimiser follows other directions. Euler with one step a segment has 50% and more.
"""
SEQUENCES = 4
"""The number of sequences of the estimate."""


def check_adjoint(objective: Objective, data: Data, device: torch.device) -> None:
    """Raises ConfigError if the adjoint's gradients of the first sequences are far from those of
    the ODE (`AdjointError.gradient`). Other kinds of gradient pass.
    """
    config = objective.config
    if config.gradient != "adjoint":
        return
    errors: list[AdjointError] = []
    measuring = Objective(objective.model, config)
    measuring.scheme = dataclasses.replace(objective.scheme, gradient=Adjoint(report=errors.append))
    count = min(SEQUENCES, config.batch)
    tokens, targets = data.batch(0, 0, batch=count, seed=config.seed, rank=0, world=1)
    try:
        measuring(tokens.to(device), targets.to(device)).total.backward()
    except SolveError:
        return  # the training meets it too, and says how it ends
    finally:
        measuring.zero_grad(set_to_none=True)
    error = max((report.gradient for report in errors), default=0.0)
    if error <= LARGEST_ERROR:
        return
    size = f"{error:.3g}" if math.isfinite(error) else "not a number or infinite"
    method = get_method(config.method)
    if method.adaptive:
        accuracy = "at these tolerances"
        finer = "lower --rtol and --atol"
    else:
        accuracy = f"at {config.steps} step(s) a segment"
        finer = "more --steps or a method of higher order"
    raise ConfigError(
        f"gradient 'adjoint' is the ODE's, and with {config.method} {accuracy} its error is {size}"
        f" of it (at most {LARGEST_ERROR:g}): choose --gradient backprop or checkpoint, which"
        f" differentiate the steps themselves, or {finer}"
    )
