"""Jacobians of small sublayers in closed form: dense, entry by entry, to test and to look at."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.fields import ACTIVATIONS, Attention, FeedForward
from ctrans.norm import Norm
from ctrans.sublayer import Sublayer
from solvers import ConfigError


@torch.no_grad()
def attention_jacobian(attention: Attention, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width tokens width"]:
    """df_j/dx_i = sum_h W_h (a_ji V_h + c sum_l a_jl (v_l - m_j) (ds_jl/dx_i)'), m_j = sum_l a_jl v_l, entry [j, :, i, :].

    Scores s_jl = q_j . k_l, c = 1/(tau sqrt(d_h)), ds_jl/dx_i = [l = i] K_h' q_j + [i = j] Q_h' k_l (Kan, Prop. 11, there for
    tau = 1 without biases). With `qk_norm`, Q_h and K_h are preceded by the Jacobian of their norm at that token. Raises ConfigError
    for an attention with `AttentionOptions` that change its scores or share its heads.
    """
    if not attention.options.idle:
        raise ConfigError(
            f"no closed form is known for attention with {attention.options}: use ctrans.stability.backward.sensitivity"
        )
    tokens, width = x.shape
    q, k, v = (part.unflatten(-1, (attention.heads, -1)).transpose(0, 1) for part in attention.qkv(x).chunk(3, dim=-1))
    parts = attention.qkv.weight.chunk(3)
    to_q, to_k, to_v = (part.reshape(attention.heads, -1, part.shape[-1]) for part in parts)
    weight = attention.out.weight
    out = weight.reshape(len(weight), attention.heads, -1)  # width, heads, head
    a = attention.probabilities(x)
    dq, dk = _after_norm(attention.query_norm, q, to_q), _after_norm(attention.key_norm, k, to_k)  # heads, tokens, head, width
    q, k = attention.query_norm(q), attention.key_norm(k)
    scale = 1 / (attention.temperature * (width // attention.heads) ** 0.5)
    centred = v.unsqueeze(1) - (a @ v).unsqueeze(2)  # heads, j, l, head
    through_keys = torch.einsum("hji,hjik,hjm,himw->jhkiw", a, centred, q, dk)
    through_queries = torch.einsum("hjl,hjlk,hlm,hjmw->jhkw", a, centred, k, dq)
    values = torch.einsum("hji,hkw->jhkiw", a, to_v)
    diagonal = torch.eye(tokens, dtype=x.dtype, device=x.device)
    inner = values + scale * (through_keys + torch.einsum("jhkw,ji->jhkiw", through_queries, diagonal))
    return torch.einsum("dhk,jhkiw->jdiw", out, inner)


def _after_norm(norm: torch.nn.Module, z: Tensor, weight: Tensor) -> Tensor:
    """d norm(z_i)/dx_i = J_norm(z_i) W for each head and token."""
    weight = weight.unsqueeze(1).expand(-1, z.shape[1], -1, -1)
    return norm.jacobian(z) @ weight if isinstance(norm, Norm) else weight


@torch.no_grad()
def feed_forward_jacobian(ffn: FeedForward, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width width"]:
    """df/dx = W_2 diag(phi'(W_1 x + b_1)) W_1 of every token."""
    z = ffn.up(x).detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(ACTIVATIONS[ffn.activation](z).sum(), z)
    product: Tensor = (ffn.down.weight * slope.unsqueeze(-2)) @ ffn.up.weight
    return product


def _of_attention(field: Attention, x: Tensor) -> Tensor:
    return attention_jacobian(field, x)


def _of_feed_forward(field: FeedForward, x: Tensor) -> Tensor:
    return spread(feed_forward_jacobian(field, x))


FIELDS = {Attention: _of_attention, FeedForward: _of_feed_forward}


@torch.no_grad()
def sublayer_jacobian(sublayer: Sublayer, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width tokens width"]:
    """dr/dX = gain J_out(f(z)) J_f(z) J_in(X), z = N_in X: the raw velocity's Jacobian, each factor in closed form.

    Raises ConfigError for a map that is neither `Attention` nor `FeedForward`.
    """
    of_field = FIELDS.get(type(sublayer.field))
    if of_field is None:
        raise ConfigError(
            f"no closed form is known for a field of type {type(sublayer.field).__name__}: use ctrans.stability.backward.sensitivity"
        )
    z = x if sublayer.input_norm is None else sublayer.input_norm(x)
    jacobian = of_field(sublayer.field, z)  # type: ignore[operator]  # each entry takes its own type
    if sublayer.input_norm is not None:
        jacobian = torch.einsum("jdiw,iwe->jdie", jacobian, sublayer.input_norm.jacobian(x))
    if sublayer.output_norm is not None:
        jacobian = torch.einsum("jcd,jdiw->jciw", sublayer.output_norm.jacobian(sublayer.field(z)), jacobian)
    scaled: Tensor = sublayer.gain * jacobian
    return scaled


@torch.no_grad()
def step_jacobian(sublayer: Sublayer, x: Float[Tensor, "tokens width"], dt: float) -> Float[Tensor, "tokens width tokens width"]:
    """dX+/dX = I + dt dr/dX, behind J_state(X + dt r(X)) where a norm stands around the state."""
    tokens, width = x.shape
    eye = torch.eye(tokens * width, dtype=x.dtype, device=x.device).reshape(tokens, width, tokens, width)
    jacobian = eye + dt * sublayer_jacobian(sublayer, x)
    if sublayer.state_norm is None:
        return jacobian
    return torch.einsum("jcd,jdiw->jciw", sublayer.state_norm.jacobian(x + dt * sublayer(x)), jacobian)


def spread(blocks: Float[Tensor, "tokens width width"]) -> Float[Tensor, "tokens width tokens width"]:
    """The Jacobian of a map that acts on each token alone, from its diagonal blocks."""
    tokens = torch.eye(blocks.shape[0], dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("jdw,ji->jdiw", blocks, tokens)
