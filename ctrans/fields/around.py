"""A module around a map, which says of the map what stays true of the two."""

from __future__ import annotations

from torch import nn

from ctrans.fields.protocols import ExplainsUnsupported, MixesTokens


class AroundMap(nn.Module):
    """A map g made of another, `field`, that mixes tokens where that does. What else `field` says
    of itself need not hold of g.
    """

    def __init__(self, field: nn.Module):
        super().__init__()
        self.field = field

    @property
    def mixes_tokens(self) -> bool:
        """What the map says of itself; not there where it says nothing."""
        if isinstance(self.field, MixesTokens):
            return self.field.mixes_tokens
        raise AttributeError("mixes_tokens")

    @property
    def why_not(self) -> str:
        """The map's own reason, after what this is."""
        reason = self.field.why_not if isinstance(self.field, ExplainsUnsupported) else ""
        return reason or f"it stands around a {type(self.field).__name__}, whose figures need not be its own"
