"""Shapes of tensors that most functions of this package take or return."""

from jaxtyping import Bool, Float
from torch import Tensor

TokenRows = Float[Tensor, "*batch tokens width"]
"""A costate P, a velocity f or a state X: one row per token, with any number of leading axes."""

UnbatchedRows = Float[Tensor, "tokens width"]
"""The same without leading axes."""

PerBatch = Float[Tensor, "*batch"]
"""One number per element of the batch, such as H(P)."""

TokenMask = Bool[Tensor, "*batch tokens"]
"""True or False for each token."""
