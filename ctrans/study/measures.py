"""Measures of a model before and after its training, on four windows of the validation split.

A new one is one entry of `MEASURES` with `studied=True`: `compute` is a function of a model, tokens
and targets to JSON values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ctrans.base.json_values import plain
from ctrans.interop.foreign_errors import named_error
from ctrans.measure.attention.by_depth import AttentionByDepth
from ctrans.measure.backward.parameter_gradients import ParameterGradients
from ctrans.measure.forward.moments import moments
from ctrans.measure.forward.single_entries import largest_entry, massive_activations
from ctrans.measure.measures import MEASURES, Chosen, Measure
from ctrans.measure.walk import States, walk
from ctrans.model.gpt import GPT
from ctrans.training.data import Data
from solvers import ConfigError, SolveError

WINDOWS = 4


def _moments(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, list[float]]:
    """The mean |entry| and the variance of X at 0 and at the end of each segment."""
    (by_depth,) = walk(model, tokens, instruments=[States(moments)])
    return {
        "mean_abs": [state.mean_abs for state in by_depth],
        "variance": [state.variance for state in by_depth],
    }


def _massive(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, list[float]]:
    """The largest |entry| by depth, and its ratio to the median one."""
    instrument = States(largest_entry)
    (by_depth,) = walk(model, tokens, instruments=[instrument])
    massive = massive_activations(by_depth)
    return {"largest": massive.largest, "ratio": massive.ratio}


def _attention(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, list[float]]:
    """For each attention sublayer, the mean theta of its rows, and log10 S with S = (theta/tau) B^2
    G (Emadi, E.6).
    """
    (layers,) = walk(model, tokens[:1], instruments=[AttentionByDepth()])
    theta = [sum(layer.theta_mean) / len(layer.theta_mean) for layer in layers]
    return {"theta": theta, "log_S": [_log10(layer.S) for layer in layers]}


def _log10(value: float) -> float:
    """log10; nan unless the value is positive."""
    if value > 0:
        return math.log10(value)
    return math.nan


def _last_gradient(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """The norm of the gradient of the last block's weights, and the largest one over sublayers
    (Xiong, theorem 1).
    """
    (gradients,) = walk(model, tokens, targets, [ParameterGradients()])
    norms = [sublayer.total for sublayer in gradients.sublayers]
    return {"last": math.hypot(*norms[-model.depth.per_block :]), "largest": max(norms)}


def _gradients(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, list[float]]:
    """The norm of the gradient of each block's weights."""
    (gradients,) = walk(model, tokens, targets, [ParameterGradients()])
    norms = [sublayer.total for sublayer in gradients.sublayers]
    per_block = model.depth.per_block
    return {
        "blocks": [math.hypot(*norms[i : i + per_block]) for i in range(0, len(norms), per_block)]
    }


MEASURES.add(
    "ctrans study",
    {
        "moments": Measure(
            formula="mean |x| and sample variance over the entries x of each X_k",
            compute=_moments,
            studied=True,
        ),
        "massive": Measure(
            formula="largest |x| over the entries x of each X_k, and its ratio to the median |x|",
            compute=_massive,
            studied=True,
        ),
        "attention": Measure(
            formula=(
                "mean theta of the rows of each attention sublayer, and log10 S with S ="
                " (theta/tau) B^2 G"
            ),
            source="Emadi, E.6",
            compute=_attention,
            studied=True,
        ),
        "last gradient": Measure(
            formula="|dL/dW| of the last block's weights, and the largest one over sublayers",
            source="Xiong, theorem 1",
            compute=_last_gradient,
            studied=True,
        ),
        "gradients": Measure(
            formula="|dL/dW| of each block's weights",
            source="Emadi, figure 1",
            compute=_gradients,
            studied=True,
        ),
    },
)
STUDIED = Chosen(lambda measure: measure.studied)
"""The measures that a study may take of its models, by name."""


def measured(names: Sequence[str], model: GPT, data: Data) -> dict[str, Any]:
    """The measures by name; the error message if one fails or gives what JSON does not have, which
    ends no training.
    """
    if not names:
        return {}
    tokens, targets = data.validation_windows(WINDOWS)
    results: dict[str, Any] = {}
    for name in names:
        compute = STUDIED[name].compute
        assert callable(compute), "a measure of a study has a function"
        try:
            value = compute(model, tokens, targets)
            json.dumps(plain(value))
            results[name] = value
        except (ConfigError, SolveError) as error:
            results[name] = str(error)
        except Exception as error:  # of a user's function
            results[name] = named_error(error)
    return results
