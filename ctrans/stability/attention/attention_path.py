"""What attention's weights alone do: the part of a sublayer's Jacobian that goes through the
softmax.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.fields import ExposesHeads, reference_kernels
from ctrans.stability.backward.singular_values import Linearisation, leading_singular, linearise
from ctrans.sublayer import Sublayer


def attention_path(sublayer: Sublayer, h: float, x: Float[Tensor, "*batch tokens width"]) -> Linearisation:
    """The Jacobian of X_{k+1} through the attention rows alone, values and residual held: J_state h
    g J_out D J_in at X.

    With U = N_in X and rows A_h(U), f(U) = sum_h A_h(U) V_h(U) W_h' + b_O, and dU moves it by two
    paths: df = sum_h A_h dV_h W_h' + sum_h dA_h V_h W_h'. D is the second, dA_h through the softmax
    and the scores of queries and keys; the offsets of values are not in it, as a row's dA sums to
    zero. J_in, J_out, J_state are the Jacobians of the norms where they stand (the identity where
    they do not), at X, f(U) and X + h r(X), g is the sublayer's gain and residual. Of a function of
    X alone, so that weights in another gauge (V and W_O against each other, Q and K, a map before
    its output norm) have the same.
    """
    branch = sublayer.attention
    assert branch is not None, "asked of attention alone"
    field = branch.field
    assert isinstance(field, ExposesHeads), "asked by whoever needs it"
    with torch.no_grad():
        entered = sublayer.enter(x)
        u = sublayer.given(entered)
        f, (values, out) = sublayer.field(u), _values(field, branch.given(u))
        rows = field.probabilities(branch.given(u))

    def step(state: Tensor) -> Tensor:
        inner = branch.given(sublayer.given(sublayer.enter(state)))
        changed = field.probabilities(inner) - rows
        # zero at X, so that f is what it is, and its derivative there is D
        v = f + (changed.to(values.dtype) @ values).transpose(-3, -2).flatten(-2) @ out.mT
        v = v if sublayer.output_norm is None else sublayer.output_norm(v)
        y: Tensor = entered + h * sublayer.joined(v, entered)
        return y if sublayer.state_norm is None else sublayer.state_norm(y)

    with reference_kernels(sublayer):
        return linearise(step, x)


def attention_path_gain(
    sublayer: Sublayer,
    h: float,
    x: Float[Tensor, "*batch tokens width"],
    y: Float[Tensor, "*batch tokens width"],
    *,
    tolerance: float,
) -> float:
    """|dX_{k+1}/dX_k along the attention path|_2 |X_k|_F/|X_{k+1}|_F: by how much a relative change of the state grows there.

    Per sequence, and the largest over the batch.
    """
    linear = attention_path(sublayer, h, x)
    before, after = (torch.linalg.vector_norm(state, dim=(-2, -1)) for state in (x, y))
    values = leading_singular(linear, tolerance=tolerance).values[..., 0]
    return float((values * before / after).max())


def _values(
    field: ExposesHeads, u: Float[Tensor, "*batch tokens width"]
) -> tuple[Float[Tensor, "*batch heads tokens head"], Float[Tensor, "width features"]]:
    """V_h(U), what each head's row averages, without offsets; and W_h side by side, through which
    heads write.
    """
    heads = list(field.head_matrices())
    return torch.stack([u @ head.value.mT for head in heads], -3), torch.cat([head.out for head in heads], 1)
