"""Shapes of tensors that many functions take or return. `*batch` is any number of leading axes."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Scalar = Float[Tensor, ""]
"""One number."""

PerBatch = Float[Tensor, "*batch"]
"""One number per element of the batch, such as H(P)."""

BatchMask = Bool[Tensor, "*batch"]
"""True or False for each element of the batch."""

PerChannel = Float[Tensor, " width"]
"""One number per channel, such as a norm's gain."""

Vectors = Float[Tensor, "*batch width"]
"""One vector per element of the batch, such as a token's state."""

TokenRows = Float[Tensor, "*batch tokens width"]
"""A costate P, a velocity f or a state X: one row per token."""

UnbatchedRows = Float[Tensor, "tokens width"]
"""The same without leading axes."""

SequenceRows = Float[Tensor, "batch tokens width"]
"""The same with one leading axis: the sequences."""

StreamRows = Float[Tensor, "*batch tokens state"]
"""The same for a state of several streams, which is wider than a map's input."""

TokenIds = Int[Tensor, "*batch tokens"]
"""Tokens by their numbers."""

TokenMask = Bool[Tensor, "*batch tokens"]
"""True or False for each token."""

AnyShape = Float[Tensor, "*shape"]
"""Any tensor, of which each entry counts alone."""
TokenBatch = Int[Tensor, "batch tokens"]
"""Token ids, one row for each sequence of a batch."""
AttentionRows = Float[Tensor, "*batch heads tokens tokens"]
"""Attention by head: row i has the weights, or scores, of token i."""
ReadingRows = Float[Tensor, "*batch heads tokens read"]
"""Attention by head over the tokens that are read, which may be of another sequence."""
ByHead = Float[Tensor, "*batch heads tokens head"]
"""Queries, keys or values by head."""
WeightMatrix = Float[Tensor, "out in"]
"""The weight matrix of a linear map."""
Matrices = Float[Tensor, "*batch width width"]
"""A square matrix for each vector."""
