"""The attention path: the part of a sublayer's Jacobian that passes through the softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.fields import ExposesHeads, reference_kernels
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.backward.singular_values import Linearisation, leading_singular, linearise


def attention_path(sublayer: Sublayer, h: float, x: TokenRows) -> Linearisation:
    """The Jacobian of X_{k+1} through the attention rows alone, with values and residual held
    fixed: J_state h g J_out D J_in at X.

    With U = N_in X and rows A_h(U), f(U) = sum_h A_h(U) V_h(U) W_h' + b_O. A change dU has two
    paths: df = sum_h A_h dV_h W_h' + sum_h dA_h V_h W_h'. D is the second, dA_h through the softmax
    and the scores. Offsets of values do not enter, because a row's dA sums to zero. J_in, J_out,
    J_state are the Jacobians of the norms at X, f(U) and X + h r(X), the identity without a norm; g
    is the sublayer's gain and residual. It is the Jacobian of a function of X, so it does not
    change if weights are rescaled without changing the model (V against W_O, Q against K, a map
    before its output norm).
    """
    branch = sublayer.attention
    assert branch is not None, "needs an attention sublayer"
    field = branch.field
    assert isinstance(field, ExposesHeads), "callers check it"
    with torch.no_grad():
        entered = sublayer.enter(x)
        u = sublayer.given(entered)
        f = sublayer.field(u)
        branch_input = branch.given(u)
        rows = field.probabilities(branch_input)
        heads = list(field.head_matrices())
        # without offsets
        values = torch.stack([branch_input @ head.value.mT for head in heads], -3)
        out = torch.cat([head.out for head in heads], 1)

    def step(state: Tensor) -> Tensor:
        inner = branch.given(sublayer.given(sublayer.enter(state)))
        changed = field.probabilities(inner) - rows
        # the second term is zero at X, and its derivative there is D
        v = f + (changed.to(values.dtype) @ values).transpose(-3, -2).flatten(-2) @ out.mT
        return sublayer.moved(entered, sublayer.raw_velocity(v, entered), h)

    with reference_kernels(sublayer):
        return linearise(step, x)


def attention_path_gain(
    sublayer: Sublayer,
    h: float,
    x: TokenRows,
    y: TokenRows,
    *,
    tolerance: float,
) -> float:
    """Gain |dX_{k+1}/dX_k along the attention path|_2 |X_k|_F/|X_{k+1}|_F: the largest growth of a
    relative change of the state.

    The largest over the sequences.
    """
    linear = attention_path(sublayer, h, x)
    before = torch.linalg.vector_norm(x, dim=(-2, -1))
    after = torch.linalg.vector_norm(y, dim=(-2, -1))
    values = leading_singular(linear, tolerance=tolerance).values[..., 0]
    return float((values * before / after).max())
