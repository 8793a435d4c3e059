"""One walk, many instruments: everything that is measured along the depth of a model is measured here, in one pass."""

from ctrans.walk.instrument import Attempt, Instrument, Passage, PassageBack, Turn
from ctrans.walk.model import Described, DescribedModel, Model, ModelOfModules, check_targets, cross_entropy, loss_refusal
from ctrans.walk.passes import Lane, observe, value_and_pullback, walk, walk_depth, walk_lanes

__all__ = [
    "Attempt",
    "Described",
    "DescribedModel",
    "Instrument",
    "Lane",
    "Model",
    "ModelOfModules",
    "Passage",
    "PassageBack",
    "Turn",
    "check_targets",
    "cross_entropy",
    "loss_refusal",
    "observe",
    "value_and_pullback",
    "walk",
    "walk_depth",
    "walk_lanes",
]
