"""A model of `transformers` that is read from its operations: its blocks, or their parts, have no
usual names.
"""

from __future__ import annotations

from torch import nn

from ctrans.interop.anatomy import Anatomy
from ctrans.interop.example_inputs import example_of
from ctrans.interop.model_adapter import context_of
from ctrans.interop.stream_adapter import StreamAdapter


class TransformersStream(StreamAdapter):
    """A model of `transformers` around the states of its residual stream. Its example is one that
    its config describes.
    """

    takes_padding = True

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        super().__init__(model, anatomy, example_of(model))
        self.family = self.model.config.model_type
        self.context = context_of(self.model.config)
