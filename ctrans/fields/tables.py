"""The tables of maps: a new attention or FFN is one entry, and GPTConfig, the commands, initialisation and tests pick it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import nn

from ctrans.fields.attention import Attention
from ctrans.fields.feed_forward import FeedForward
from ctrans.fields.protocols import Kind


@runtime_checkable
class MapSettings(Protocol):
    """What a map is made from: the part of an architecture that concerns it. A `GPTConfig` is one."""

    @property
    def width(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def hidden_width(self) -> int:
        """The FFN's."""

    @property
    def activation(self) -> str: ...

    @property
    def bias(self) -> bool: ...

    @property
    def causal(self) -> bool: ...

    @property
    def temperature(self) -> float: ...

    @property
    def qk_norm(self) -> bool: ...

    @property
    def eps(self) -> float: ...


Maker = Callable[[MapSettings], nn.Module]


def _softmax(settings: MapSettings) -> Attention:
    return Attention(
        settings.width,
        settings.heads,
        causal=settings.causal,
        temperature=settings.temperature,
        qk_norm=settings.qk_norm,
        bias=settings.bias,
        eps=settings.eps,
    )


def _mlp(settings: MapSettings) -> FeedForward:
    return FeedForward(settings.width, settings.hidden_width, activation=settings.activation, bias=settings.bias)


ATTENTIONS: dict[str, Maker] = {"softmax": _softmax}
FFNS: dict[str, Maker] = {"mlp": _mlp}
FIELDS: dict[Kind, dict[str, Maker]] = {"attention": ATTENTIONS, "ffn": FFNS}
"""Both tables. A block is one map of each, in this order."""
