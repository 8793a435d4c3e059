"""One walk, many instruments: all measurements along the depth of a model happen in one pass."""

from ctrans.measure.walk.instrument import (
    Attempt,
    Instrument,
    States,
    StepContext,
    StepContextBack,
    Turn,
)
from ctrans.measure.walk.model import (
    Described,
    DescribedModel,
    Model,
    ModelOfModules,
    check_targets,
    cross_entropy,
    kept_of,
    loss_refusal,
    own_loss,
    terminal_loss,
)
from ctrans.measure.walk.passes import (
    Lane,
    SegmentCallback,
    observe,
    states_of,
    value_and_pullback,
    walk,
    walk_depth,
    walk_lanes,
)

__all__ = [
    "Attempt",
    "Described",
    "DescribedModel",
    "Instrument",
    "Lane",
    "Model",
    "ModelOfModules",
    "SegmentCallback",
    "States",
    "StepContext",
    "StepContextBack",
    "Turn",
    "check_targets",
    "cross_entropy",
    "kept_of",
    "loss_refusal",
    "observe",
    "own_loss",
    "states_of",
    "terminal_loss",
    "value_and_pullback",
    "walk",
    "walk_depth",
    "walk_lanes",
]
