"""A module that wraps a map, with the properties that carry over."""

from __future__ import annotations

from torch import nn

from ctrans.dynamics.fields.protocols import ExplainsUnsupported, MixesTokens


class AroundMap(nn.Module):
    """A map g made from another one, `field`. It mixes tokens if `field` does. Other properties of
    `field` need not hold for g.
    """

    def __init__(self, field: nn.Module):
        super().__init__()
        self.field = field

    @property
    def mixes_tokens(self) -> bool:
        """The value of the wrapped map. Raises AttributeError if it has none."""
        if isinstance(self.field, MixesTokens):
            return self.field.mixes_tokens
        raise AttributeError("mixes_tokens")

    @property
    def why_not(self) -> str:
        """The wrapped map's reason, or that it is wrapped."""
        if isinstance(self.field, ExplainsUnsupported) and self.field.why_not:
            return self.field.why_not
        return f"it wraps a {type(self.field).__name__}, whose properties need not be its own"
