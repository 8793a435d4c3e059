"""The maps of a Transformer's ODE, and the protocols by which a map describes itself."""

from ctrans.dynamics.fields.activations import ACTIVATIONS, Activation
from ctrans.dynamics.fields.around import AroundMap
from ctrans.dynamics.fields.attention import Attention, SoftmaxAttention, reference_kernels
from ctrans.dynamics.fields.attention_options import AttentionOptions
from ctrans.dynamics.fields.branch import Branch, BranchGains, OwnGains
from ctrans.dynamics.fields.check_map import check_map, check_shape
from ctrans.dynamics.fields.differential_attention import DifferentialAttention
from ctrans.dynamics.fields.experts import MixtureOfExperts
from ctrans.dynamics.fields.feed_forward import FeedForward, GatedLinearUnits
from ctrans.dynamics.fields.linear_attention import (
    GatedLinearAttention,
    KernelAttention,
    LinearAttention,
)
from ctrans.dynamics.fields.parallel_maps import ParallelMaps
from ctrans.dynamics.fields.positions import POSITIONS
from ctrans.dynamics.fields.protocols import (
    Balances,
    ExplainsUnsupported,
    ExposesHeads,
    ExposesRows,
    ExposesWeights,
    HasAuxiliary,
    HasBound,
    HasDiscontinuities,
    HasLipschitz,
    HasOutputProjection,
    HasReferenceKernel,
    HasTemperature,
    HasUnits,
    HeadMatrices,
    Kind,
    Matrix,
    MixesTokens,
    Role,
    Scalable,
    SumOfMaps,
    SupportsTokenSubset,
    TokenBound,
    Units,
    mixes_tokens,
    why_not,
)
from ctrans.dynamics.fields.query_key_norm import QK_NORMS
from ctrans.dynamics.fields.routing import EXPERTS, ROUTERS, ExpertOptions
from ctrans.dynamics.fields.spectral_norm import norm_of_product, norms_found_once, spectral_norm
from ctrans.dynamics.fields.tables import ATTENTIONS, FFNS, FIELDS, MapEntry, MapSettings

__all__ = [
    "ACTIVATIONS",
    "ATTENTIONS",
    "EXPERTS",
    "FFNS",
    "FIELDS",
    "POSITIONS",
    "QK_NORMS",
    "ROUTERS",
    "Activation",
    "AroundMap",
    "Attention",
    "AttentionOptions",
    "Balances",
    "Branch",
    "BranchGains",
    "DifferentialAttention",
    "ExpertOptions",
    "ExplainsUnsupported",
    "ExposesHeads",
    "ExposesRows",
    "ExposesWeights",
    "FeedForward",
    "GatedLinearAttention",
    "GatedLinearUnits",
    "HasAuxiliary",
    "HasBound",
    "HasDiscontinuities",
    "HasLipschitz",
    "HasOutputProjection",
    "HasReferenceKernel",
    "HasTemperature",
    "HasUnits",
    "HeadMatrices",
    "KernelAttention",
    "Kind",
    "LinearAttention",
    "MapEntry",
    "MapSettings",
    "Matrix",
    "MixesTokens",
    "MixtureOfExperts",
    "OwnGains",
    "ParallelMaps",
    "Role",
    "Scalable",
    "SoftmaxAttention",
    "SumOfMaps",
    "SupportsTokenSubset",
    "TokenBound",
    "Units",
    "check_map",
    "check_shape",
    "mixes_tokens",
    "norm_of_product",
    "norms_found_once",
    "reference_kernels",
    "spectral_norm",
    "why_not",
]
