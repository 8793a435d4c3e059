"""The maps whose ODE a Transformer is, and what a map may say of itself."""

from ctrans.fields.attention import Attention, plain_attention
from ctrans.fields.feed_forward import ACTIVATIONS, Activation, FeedForward
from ctrans.fields.protocols import (
    AffineBound,
    EndsLinear,
    HasAffineBound,
    HasLipschitz,
    HasPlainPath,
    HasTemperature,
    HasUnits,
    HeadMatrices,
    Kind,
    Matrix,
    MixesTokens,
    Role,
    Scalable,
    ShowsHeads,
    ShowsMatrices,
    mixes_tokens,
)
from ctrans.fields.spectral_norm import spectral_norm
from ctrans.fields.tables import ATTENTIONS, FFNS, FIELDS, MapSettings

__all__ = [
    "ACTIVATIONS",
    "ATTENTIONS",
    "FFNS",
    "FIELDS",
    "Activation",
    "AffineBound",
    "Attention",
    "EndsLinear",
    "FeedForward",
    "HasAffineBound",
    "HasLipschitz",
    "HasPlainPath",
    "HasTemperature",
    "HasUnits",
    "HeadMatrices",
    "Kind",
    "MapSettings",
    "Matrix",
    "MixesTokens",
    "Role",
    "Scalable",
    "ShowsHeads",
    "ShowsMatrices",
    "mixes_tokens",
    "plain_attention",
    "spectral_norm",
]
