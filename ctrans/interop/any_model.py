"""`ctrans.diagnose`, `ctrans.screen` and `ctrans.simulate` of any module: what is no model of ours is opened on the tokens given."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.interop.losses import Loss
from ctrans.interop.open_model import open_model
from ctrans.stability.diagnosis import diagnose as diagnosis
from ctrans.stability.diagnosis.diagnose import Diagnosis
from ctrans.stability.forward import simulation
from ctrans.stability.forward.simulation import Simulation
from ctrans.stability.screening import screen as screening
from ctrans.stability.screening.screen import Screening


def diagnose(model: Any, tokens: Any, targets: Any = None, *, loss: str | Loss | None = None, **options: Any) -> Diagnosis:
    """`ctrans.stability.diagnosis.diagnose.diagnose` of a model, or of any module, which is opened by `open_model` on these tokens with
    that loss. Raises ConfigError as both do.
    """
    return diagnosis.diagnose(opened(model, tokens, loss), tokens, targets, **options)


def screen(model: Any, tokens: Any, targets: Any, *effort: Any, loss: str | Loss | None = None, **options: Any) -> Screening:
    """`ctrans.stability.screening.screen.screen` of a model, or of any module, likewise."""
    return screening.screen(opened(model, tokens, loss), tokens, targets, *effort, **options)


def simulate(model: Any, tokens: Tensor, **options: Any) -> Simulation:
    """`ctrans.stability.forward.simulation.simulate` of a model, or of any module, likewise."""
    return simulation.simulate(opened(model, tokens, None), tokens, **options)


def opened(model: Any, tokens: Any, loss: str | Loss | None) -> Any:
    """The model as it is where it has a `Depth` and no other loss is asked for; any other module opened on these tokens.

    A number of blocks that a module calls its depth is none. A Hugging Face model says itself what it reads, and is opened by its family.
    """
    if isinstance(getattr(model, "depth", None), Depth) and loss is None:
        return model
    if not isinstance(model, nn.Module):
        return open_model(model, loss=loss)  # a path, or an error that says what is allowed
    family = isinstance(tokens, Tensor) and hasattr(getattr(model, "config", None), "model_type")
    return open_model(model, example=None if family else tokens, loss=loss)
