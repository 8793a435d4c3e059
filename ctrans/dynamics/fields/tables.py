"""The tables of maps. A new attention or FFN is one entry; GPTConfig, the commands, initialisation
and tests include it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection

from torch import nn

from ctrans.base.option import part_of
from ctrans.dynamics.fields.attention import (
    Attention,
    AttentionWithoutSinks,
    SoftmaxAttention,
    qk_norm_name,
)
from ctrans.dynamics.fields.attention_options import AttentionOptions
from ctrans.dynamics.fields.differential_attention import DifferentialAttention
from ctrans.dynamics.fields.experts import MixtureOfExperts
from ctrans.dynamics.fields.feed_forward import (
    GATES,
    MULTIPLE,
    FeedForward,
    GatedLinearUnits,
    gated_hidden_width,
)
from ctrans.dynamics.fields.linear_attention import GatedLinearAttention, LinearAttention
from ctrans.dynamics.fields.protocols import Kind
from ctrans.dynamics.fields.routing import ExpertOptions
from solvers import ConfigError, look_up, shown


class MapSettings(AttentionOptions, ExpertOptions):
    """The settings from which a map is made: the part of a `GPTConfig` that maps read."""

    width: int
    heads: int
    activation: str
    bias: bool
    causal: bool
    temperature: float
    qk_norm: bool | str
    eps: float

    @property
    def hidden_width(self) -> int:
        """The hidden width of the FFN."""
        raise NotImplementedError


Maker = Callable[[MapSettings], nn.Module]


def _defaults(options: AttentionOptions | ExpertOptions) -> dict[str, Collection[object]]:
    return {name: (value,) for name, value in dataclasses.asdict(options).items()}


IDLE: dict[Kind, dict[str, Collection[object]]] = {
    "attention": {
        "causal": (True,),
        "temperature": (1.0,),
        "qk_norm": (False,),
        **_defaults(AttentionOptions()),
        "positions": ("learned", "none"),
    },
    "ffn": {"activation": ("gelu",), **_defaults(ExpertOptions())},
}
"""Settings that only some maps use, and the values that have no effect."""


@dataclasses.dataclass(frozen=True)
class MapEntry:
    """A maker, with the settings in `IDLE` that its maps use. `check_maps` rejects others."""

    make: Maker
    takes: frozenset[str] = frozenset()
    hidden_width: Callable[[int, ExpertOptions], int] = lambda width, experts: 4 * width
    """For an FFN: its default number of features at a width."""
    batches: bool = False
    """Whether its operations work under `torch.func.vmap`, so that a population of such models can
    train as one.
    """

    def __call__(self, settings: MapSettings) -> nn.Module:
        return self.make(settings)


def check_maps(settings: MapSettings) -> None:
    """Raises ConfigError, with the name of the option, for options that are invalid, alone or for
    the chosen maps.

    It does not check a maker without `MapEntry`.
    """
    qk_norm_name(settings.qk_norm)
    part_of(AttentionOptions, settings).check_heads(settings.width, settings.heads)
    experts_are_gated = part_of(ExpertOptions, settings).expert in GATES
    if experts_are_gated and settings.activation not in IDLE["ffn"]["activation"]:
        raise ConfigError(
            f"activation = {settings.activation!r} has no meaning for expert {settings.expert!r},"
            " whose gate has its own: leave it out, or choose expert mlp"
        )
    for kind, options in IDLE.items():
        name = getattr(settings, kind)
        look_up(kind, name, FIELDS[kind])
        for option, idle in options.items():
            value = getattr(settings, option)
            if value not in idle and not takes(kind, name, option):
                able = [key for key in FIELDS[kind] if takes(kind, key, option)]
                raise ConfigError(
                    f"{option} = {shown(value)} has no meaning for {kind} {name!r}: leave it out,"
                    f" or choose {kind} {', '.join(able)}"
                )


def takes(kind: Kind, name: str, option: str) -> bool:
    """Whether maps of that entry use the option. True for a maker without `MapEntry`."""
    entry = FIELDS[kind][name]
    return not isinstance(entry, MapEntry) or option in entry.takes


def usual_hidden_width(width: int, ffn: str, experts: ExpertOptions) -> int:
    """The default number of features of the FFN: 4 d, or the entry's number."""
    entry = FFNS[ffn]
    if isinstance(entry, MapEntry):
        return entry.hidden_width(width, experts)
    return 4 * width


def _made(map_class: Callable[..., nn.Module], size: str, *names: str, **fixed: object) -> Maker:
    """A maker of map_class(width, size, name=.., ..) from the settings of these names, and from
    `fixed`.
    """

    def make(settings: MapSettings) -> nn.Module:
        from_settings = {name: getattr(settings, name) for name in names}
        return map_class(settings.width, getattr(settings, size), **from_settings, **fixed)

    return make


def _softmax(settings: MapSettings) -> nn.Module:
    options = part_of(AttentionOptions, settings)
    if options.sinks:
        map_class = SoftmaxAttention
    elif options.gated_output:
        map_class = AttentionWithoutSinks
    else:
        map_class = Attention
    names = ("causal", "temperature", "qk_norm", "bias", "eps")
    return _made(map_class, "heads", *names, options=options)(settings)


def _gated(activation: str) -> MapEntry:
    make = _made(GatedLinearUnits, "hidden_width", "bias", activation=activation)
    return MapEntry(
        make, hidden_width=lambda width, experts: gated_hidden_width(width), batches=True
    )


def _experts(settings: MapSettings) -> nn.Module:
    options = part_of(ExpertOptions, settings)
    make = _made(MixtureOfExperts, "hidden_width", "activation", "bias", options=options)
    return make(settings)


def _expert_hidden_width(width: int, experts: ExpertOptions) -> int:
    """The features of each expert: all experts of a token together have as many as the plain
    FFN.
    """
    if experts.expert in GATES:
        features = gated_hidden_width(width)
    else:
        features = 4 * width
    return MULTIPLE * math.ceil(features / experts.active / MULTIPLE)


ATTENTIONS: dict[str, Maker] = {
    "softmax": MapEntry(_softmax, frozenset(IDLE["attention"]), batches=True),
    "linear": MapEntry(_made(LinearAttention, "heads", "causal", "bias"), frozenset({"causal"})),
    "gated_linear": MapEntry(_made(GatedLinearAttention, "heads", "bias")),
    "differential": MapEntry(
        _made(DifferentialAttention, "heads", "causal", "temperature", "bias"),
        frozenset({"causal", "temperature"}),
    ),
}
FFNS: dict[str, Maker] = {
    "mlp": MapEntry(
        _made(FeedForward, "hidden_width", "activation", "bias"),
        frozenset({"activation"}),
        batches=True,
    ),
    **{name: _gated(activation) for name, activation in GATES.items()},
    "moe": MapEntry(_experts, frozenset(IDLE["ffn"]), _expert_hidden_width),
}
FIELDS: dict[Kind, dict[str, Maker]] = {"attention": ATTENTIONS, "ffn": FFNS}
"""Both tables. A block has one map of each, in this order."""
