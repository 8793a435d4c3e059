"""The maps whose ODE a Transformer is, and what a map may say of itself."""

from ctrans.fields.activations import ACTIVATIONS, Activation
from ctrans.fields.around import AroundMap
from ctrans.fields.attention import Attention, plain_attention
from ctrans.fields.check_map import check_map, check_shape
from ctrans.fields.feed_forward import FeedForward
from ctrans.fields.protocols import (
    EndsLinear,
    HasBound,
    HasLipschitz,
    HasPlainPath,
    HasTemperature,
    HasUnits,
    HeadMatrices,
    Kind,
    Matrix,
    MixesTokens,
    Role,
    SaysWhyNot,
    Scalable,
    ShowsHeads,
    ShowsMatrices,
    TokenBound,
    Units,
    mixes_tokens,
    why_not,
)
from ctrans.fields.spectral_norm import norm_of_product, norms_found_once, spectral_norm
from ctrans.fields.tables import ATTENTIONS, FFNS, FIELDS, MapSettings

__all__ = [
    "ACTIVATIONS",
    "ATTENTIONS",
    "FFNS",
    "FIELDS",
    "Activation",
    "AroundMap",
    "Attention",
    "EndsLinear",
    "FeedForward",
    "HasBound",
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
    "SaysWhyNot",
    "Scalable",
    "ShowsHeads",
    "ShowsMatrices",
    "TokenBound",
    "Units",
    "check_map",
    "check_shape",
    "mixes_tokens",
    "norm_of_product",
    "norms_found_once",
    "plain_attention",
    "spectral_norm",
    "why_not",
]
