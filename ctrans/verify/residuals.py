"""What residuals make of the Hamiltonian, of growth and of gradients: gains, steps towards an image, streams."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from ctrans.control import admissible_set
from ctrans.control.costate import costate
from ctrans.control.regularization import Regularization
from ctrans.control.residual_pullback import check_towards_image
from ctrans.model.gpt import GPT
from ctrans.norm import Norm
from ctrans.residual import Streams, sinkhorn
from ctrans.stability.forward.mixing import product_gains
from ctrans.sublayer import Sublayer
from ctrans.verify.draws import below, between, described, model, noise, norm, one_of, size, text
from ctrans.verify.statement import Check, Statement, Trial, as_printed, at_most, equal, holds_if, worst
from ctrans.walk import states_of

BEHIND_A_NORM = ("layerscale", "rezero", "hyper_connections", "mhc")


def _with_norm(generator: torch.Generator, residual: str) -> tuple[GPT, Sublayer, Norm, Tensor]:
    made = model(generator, one_of(generator, ("peri", "output")), residual=residual, eps=0.0)
    sublayer = one_of(generator, made.depth.sublayers)
    assert sublayer.output_norm is not None, "its placement has one"
    P = noise(generator, 1 + below(generator, 4), 8 * made.config.state_streams)
    return made, sublayer, sublayer.output_norm, P


def pullback(generator: torch.Generator) -> Trial:
    """H over {W v} at P is H over the v at W'P: its maximiser attains it, and 30 outputs through the sublayer's own W do not exceed it."""
    made, sublayer, chosen, P = _with_norm(generator, one_of(generator, BEHIND_A_NORM))
    q = sublayer.pulled(P)
    H, x = float(admissible_set(chosen, "peri").support(q)), torch.zeros_like(P)
    best = sublayer.joined(admissible_set(chosen, "peri").maximizer(q), x)
    others = torch.stack([sublayer.joined(chosen(noise(generator, len(P), 8)), x) for _ in range(30)])
    scale = float(P.norm() * best.norm())
    return worst(
        equal(-(P * best).sum(), H, f"{made.config.residual}, {described(made)}", scale),
        Trial((float(-(P * others).sum((-2, -1)).amin()) - H) / scale, "the best of 30 outputs against H"),
    )


def _scaled(generator: torch.Generator, name: str, least: int = 2) -> tuple[Norm, Tensor, float, list[float], float]:
    """A norm, P, a bound R, the values of H at g * P for gains of every sign of size R (eight channels have 256), and a scale."""
    chosen = norm(generator, name, width=least + below(generator, 5))
    P, R = noise(generator, 1 + below(generator, 3), chosen.width), size(generator, -1, 1)
    signs = torch.cartesian_prod(*[torch.tensor([-R, R], dtype=torch.float64)] * chosen.width)
    values = [float(admissible_set(chosen, "peri").support(g * P)) for g in signs]
    scale = R * float((P.norm(dim=-1) * admissible_set(chosen, "peri").maximizer(P).norm(dim=-1)).sum())
    return chosen, P, R, values, scale


def gain_by_channel(generator: torch.Generator) -> Trial:
    """RMSNorm: every corner of the box has R H(P), 30 gains inside have no more. LayerNorm: corners are between R H(P) and the bound."""
    chosen, P, R, values, scale = _scaled(generator, "rmsnorm")
    H = R * float(admissible_set(chosen, "peri").support(P))
    inside = [between(generator, -R, R) * torch.ones(chosen.width, dtype=torch.float64) for _ in range(5)]
    inside += [R * (2 * torch.rand(chosen.width, dtype=torch.float64, generator=generator) - 1) for _ in range(25)]
    most = max(float(admissible_set(chosen, "peri").support(g * P)) for g in inside)
    other, Q, S, corners, _ = _scaled(generator, "layernorm")
    bound = S * float(math.sqrt(other.width) * (other.gamma * Q).norm(dim=-1).sum() + (Q.sum(0).abs() * other.beta.abs()).sum())
    least = S * float(admissible_set(other, "peri").support(Q))
    return worst(
        equal(
            torch.tensor(values, dtype=torch.float64),
            H,
            f"corners, d = {chosen.width}",
            scale,
        ),
        Trial((most - H) / scale, "gains inside the box against R H(P)"),
        at_most(max(corners), bound, f"LayerNorm, d = {other.width}: the best corner against the bound"),
        Trial((least - max(corners)) / bound, "LayerNorm: R H(P) against the best corner"),
    )


def layernorm_by_channel(generator: torch.Generator) -> Trial:
    """R H(P) for LayerNorm against the best corner of the box."""
    chosen, P, R, values, _ = _scaled(generator, "layernorm", 4)
    H = R * float(admissible_set(chosen, "peri").support(P))
    return at_most(max(values), H, f"LayerNorm, d = {chosen.width}: the best gains with |g_i| <= R against R H(P)")


def one_gain(generator: torch.Generator) -> Trial:
    """max over 41 values of |a| <= R of H(a P) is R max(H(P), H(-P)), and ten times the bound has ten times that."""
    chosen = norm(generator)
    P, R = noise(generator, 1 + below(generator, 3), chosen.width), size(generator, -1, 1)

    def most(bound: float) -> float:
        return max(
            float(admissible_set(chosen, "peri").support(a * P)) for a in torch.linspace(-bound, bound, 41, dtype=torch.float64)
        )

    H = R * max(float(admissible_set(chosen, "peri").support(sign * P)) for sign in (-1, 1))
    scale = R * float((P.norm(dim=-1) * admissible_set(chosen, "peri").maximizer(P).norm(dim=-1)).sum())
    return worst(
        equal(most(R), H, f"d = {chosen.width}, {len(P)} tokens", scale),
        equal(most(10 * R), 10 * H, "ten times the bound", 10 * scale),
    )


def towards_image(generator: torch.Generator) -> Trial:
    """H_N(Q) + <Q, X>: the closed form's maximiser attains it through the sublayer, and 30 outputs do not exceed it."""
    made = model(generator, one_of(generator, ("post", "pre_post")), residual="ngpt", eps=0.0)
    sublayer = one_of(generator, made.depth.sublayers)
    around, image = sublayer.state_norm, sublayer.image
    assert around is not None, "its placement has a norm around the state"
    assert image is not None, "its residual has a norm of its own"
    P, X = noise(generator, 1 + below(generator, 3), 8), around(noise(generator, 1, 8))
    X = X.expand_as(P).contiguous()
    H = check_towards_image(sublayer, X, P, noise(generator, len(P), 16), Regularization()).hamiltonian
    q = sublayer.pulled(torch.func.vjp(lambda f: around.tangent(X, f), P)[1](P)[0])
    assert sublayer.residual is not None, "it was asked for"
    best = around.tangent(X, sublayer.residual.pull(admissible_set(image, "peri").maximizer(q) - X))
    outputs = [sublayer.joined(noise(generator, *P.shape), X) for _ in range(30)]
    others = max(float(-(P * around.tangent(X, r)).sum()) for r in outputs)
    scale = float(q.norm() * (X.norm() + admissible_set(image, "peri").maximizer(q).norm()))
    return worst(
        equal(-(P * best).sum(), H, described(made), scale),
        Trial((others - H) / scale, "the best of 30 outputs against H"),
    )


def radial(generator: torch.Generator) -> Trial:
    """<g, dL/dg> by autograd against dt <P, r>, P dL/d(X + dt r) of the discrete model."""
    residual = one_of(generator, ("layerscale", "rezero", "ngpt", "hyper_connections"))
    made = model(generator, "post" if residual == "ngpt" else one_of(generator, ("pre", "peri")), residual=residual)
    ids, targets, k = text(generator), text(generator), below(generator, 4)
    sublayer, dt = made.depth.sublayers[k], made.depth.lengths[k]
    found = costate(made, ids, targets)
    x, p = sublayer.enter(found.states[k]), found.costates[k + 1]
    if sublayer.state_norm is not None:
        p = torch.func.vjp(sublayer.state_norm, x + dt * sublayer(x))[1](p)[0]
    assert sublayer.residual is not None, "it was asked for"
    gains = sublayer.residual.get_parameter("write_weights" if residual == "hyper_connections" else "gain")
    with torch.enable_grad():
        gains.requires_grad_()
        (slope,) = torch.autograd.grad(made(ids, targets)[1], gains)
        gains.requires_grad_(False)
    velocity = sublayer(x)
    scale = dt * float(p.norm() * velocity.norm())
    return equal((gains * slope).sum(), dt * (p * velocity).sum(), f"{residual}, {described(made)}", scale)


def scaled_growth(generator: torch.Generator) -> Trial:
    """Tokens of `pre` with LayerNorm scaling, maps without offsets: at most |x_0| + 4 dt a g sqrt(d D), a g the largest there."""
    depth = 1 + below(generator, 40)
    made = model(generator, "pre", residual="depth_scaled", depth=depth, bias=False, norm="rmsnorm")
    states = states_of(made.depth, size(generator, -1, 1) * noise(generator, 1, 4, 8))
    gain = max(part.field.bound().gain * float(part.input_norm.gamma.abs().max()) for part in made.depth.sublayers)  # type: ignore[union-attr]  # maps with bounds
    longest = [float(x.norm(dim=-1).max()) for x in (states[0], states[-1])]
    return at_most(
        longest[1], longest[0] + 4 * made.config.dt * gain * math.sqrt(8 * depth), f"the longest token, {described(made)}"
    )


def isometry(generator: torch.Generator) -> Trial:
    """a = 0 in every sublayer: X_D = X_0 and the Jacobian is the identity."""
    made = model(generator, one_of(generator, ("none", "pre", "peri", "output")), residual="rezero", spread=0.0)
    x = size(generator, -1, 1) * noise(generator, 3, 8)
    jacobian = torch.func.jacrev(made.depth)(x).reshape(x.numel(), x.numel())
    return worst(
        equal(made.depth(x), x, f"X_D, {described(made)}"),
        equal(jacobian, torch.eye(x.numel(), dtype=x.dtype), "the Jacobian"),
    )


def _doubly_stochastic(generator: torch.Generator, rounds: int) -> Tensor:
    streams = 2 + below(generator, 5)
    logits = 4 * torch.eye(streams, dtype=torch.float64) + noise(generator, 1 + below(generator, 30), streams, streams)
    return sinkhorn(logits, rounds)


def mixing(generator: torch.Generator) -> Trial:
    """Products of doubly stochastic matrices have norm 1 and keep the mean stream; free ones M = (1 + s) I have (1 + s)^k."""
    each = _doubly_stochastic(generator, 3000)
    gains, streams = product_gains(each), each.shape[-1]
    rows = torch.full((streams,), 1 / streams, dtype=torch.float64)
    s = between(generator, 0.01, 0.2)
    free = product_gains((1 + s) * torch.eye(3, dtype=torch.float64).expand(len(each), 3, 3))
    return worst(
        equal(
            torch.tensor(gains, dtype=torch.float64),
            1.0,
            f"{len(each)} matrices of {streams} streams",
        ),
        equal(torch.stack([rows @ m for m in each]), rows.expand(len(each), -1), "the mean stream"),
        equal(free[-1], (1 + s) ** len(each), "free mixing"),
    )


def twenty_rounds(generator: torch.Generator) -> Trial:
    """Rows of M after 20 Sinkhorn rounds from nearly the identity."""
    each = _doubly_stochastic(generator, 20)
    return equal(each.sum(-1), torch.ones(each.shape[:-1]), f"row sums of {each.shape[-1]} streams")


def mean_stream(generator: torch.Generator) -> Trial:
    """The streams' mean after a step of the model is their mean before plus dt mean(b) v."""
    made = model(generator, one_of(generator, ("pre", "peri", "none")), residual="mhc")
    sublayer, streams = one_of(generator, made.depth.sublayers), made.config.state_streams
    assert isinstance(sublayer.residual, Streams), "it was asked for"
    x = size(generator, -1, 1) * noise(generator, 1, 4, 8 * streams)
    v = sublayer.field(sublayer.given(sublayer.enter(x)))
    v = v if sublayer.output_norm is None else sublayer.output_norm(v)
    before, after = (part.unflatten(-1, (streams, 8)).mean(-2) for part in (x, sublayer.step(x, made.config.dt)))
    return equal(after, before + made.config.dt * sublayer.residual.writes.mean() * v, described(made))


def parallel_limit(generator: torch.Generator) -> Trial:
    """One block's weights at every depth, T fixed: parallel and sequential blocks differ by O(dt)."""
    gaps = []
    seed, x = below(generator, 2**31), noise(generator, 1, 4, 8)
    for blocks in (16, 32, 64):
        ends = []
        for parallel in (False, True):
            fresh = torch.Generator().manual_seed(seed)
            made = model(
                fresh,
                "pre",
                spread=0.0,
                depth=1,
                norm="rmsnorm",
                activation="gelu",
                causal=True,
                dt=1.0,
                parallel_blocks=parallel,
            )
            ends.append(made.depth.refine(blocks)(x))
        gaps.append(float((ends[0] - ends[1]).norm()))
    orders = [math.log2(a / b) for a, b in pairwise(gaps)]
    words = f"{gaps[0]:.2g}, {gaps[1]:.2g}, {gaps[2]:.2g} apart at 16, 32 and 64 blocks"
    return worst(holds_if(gaps[-1] > 0, "they differ"), Trial(abs(orders[-1] - 1), words))


def section(generator: torch.Generator) -> Trial:
    """Gains that are 0 in some channels, inside a norm around the state: the step's support in closed form, the ODE's costates of H = 0.

    N(X + dt g * f) = beta + sqrt(d) gamma * C y/|C y|, C y = r + v: v any vector of V = C span(e_i : g_i != 0), r the part of C X that
    is orthogonal to it. <q, v + r>/|v + r|, q = gamma * p, is largest at v = a |r|^2/b, a the part of q in V and b = <q, r> > 0;
    for b <= 0 it only comes near |a|, for long v.
    """
    chosen = norm(generator, width=3 + below(generator, 6))
    d, dt = chosen.width, size(generator, -2, 0)
    p, X = noise(generator, d), noise(generator, d)
    g = torch.where(
        torch.arange(d) < 1 + below(generator, d - 1), 0.5 + torch.rand(d, generator=generator, dtype=torch.float64), 0.0
    )
    g = g[torch.randperm(d, generator=generator)]
    basis = torch.linalg.svd(chosen.centre(torch.eye(d, dtype=torch.float64)[g != 0]).T, full_matrices=False)
    V = basis.U[:, basis.S > 1e-9]
    q, centred = chosen.gamma * p, chosen.centre(X)
    r = centred - V @ (V.T @ centred)
    r = r if float(r.norm()) > 1e-9 * float(centred.norm()) else torch.zeros_like(r)  # V is all that centring leaves
    a, b = V.T @ q, float(q @ r)
    beside = b**2 / float(r @ r) if b > 0 else 0.0
    H = math.sqrt(d) * math.sqrt(float(a @ a) + beside) + float(p @ chosen.beta)
    v = V @ a * (float(r @ r) / b if b > 0 else 1e8 * float(X.norm() / a.norm()))
    # some f has C(X + dt g * f) = v + r, as V is what these channels make
    f = torch.linalg.lstsq(dt * chosen.centre(torch.diag(g)).T, (v + r - centred).unsqueeze(-1), driver="gelsd").solution[:, 0]
    raw = size(generator, -1, 5) * noise(generator, 300, d)
    scale = math.sqrt(d) * float(q.norm())
    A = torch.stack([chosen.tangent(chosen.retract(X), g * e) for e in torch.eye(d, dtype=torch.float64)], -1)
    idle = torch.linalg.svd(A.T).Vh[int(torch.linalg.matrix_rank(A)) :]
    outputs = g * noise(generator, 30, d)
    moved = chosen.tangent(chosen.retract(X).expand_as(outputs), outputs)
    words = f"{type(chosen).__name__}, d = {d}, {int((g != 0).sum())} channels move"
    return worst(
        equal(chosen(X + dt * g * f) @ p, H, f"{words}: what the best output reaches", scale),
        Trial((float((chosen(X + dt * g * raw) @ p).max()) - H) / scale, f"{words}: 300 outputs against the support"),
        Trial(
            float((moved @ idle.T).abs().max()) / float(moved.norm()),
            f"{words}: a costate that T' takes to channels without gain",
        ),
        holds_if(
            len(idle) >= d - int((g != 0).sum()), f"{words}: costates of H = 0, of at least as many dimensions as channels stand"
        ),
    )


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "parallel-limit",
        2,
        "ctrans (Lie-Trotter)",
        "at equal weights parallel and sequential blocks have one limit: at fixed T they differ by O(dt)",
        Check(parallel_limit, 0.15, share=0.01),
    ),
    Statement(
        "residual-pullback",
        4,
        "ctrans",
        "velocities W v, W linear (gains by channel, streams written to): H(P) is that of the v at W'P, attained at W v*",
        Check(pullback, 1e-12),
    ),
    Statement(
        "residual-gain",
        4,
        "ctrans, on LayerScale",
        "gains |g_i| <= R by channel, trained behind RMSNorm: H = R H(P); behind LayerNorm at least that",
        Check(gain_by_channel, 1e-9, share=0.2),
        Check(layernorm_by_channel, share=0.2),
        "the same R H(P) behind LayerNorm",
    ),
    Statement(
        "residual-one-gain",
        4,
        "ctrans, on ReZero and SkipInit",
        "one gain |a| <= R, trained behind an output norm: H = R max(H(P), H(-P)), so +inf over all a where P is not a tie",
        Check(one_gain, 1e-12),
    ),
    Statement(
        "towards-image",
        4,
        "ctrans, on nGPT",
        "dX/dt = T_X a * (N f - X): H = H_N(Q) + <Q, X>, Q = a * T_X'P, finite for the steps a and gains as they are, and attained",
        Check(towards_image, 1e-9, share=0.2),
    ),
    Statement(
        "residual-section",
        4,
        "ctrans, on LayerScale with gains of 0",
        "around the state, gains 0 in some channels: sup <p, N(X + dt g*f)> = sqrt(d)(|a|^2 + max(0, b)^2/|r|^2)^(1/2) + <p, beta>, a the "
        "part of gamma*p in V = C span(e_i: g_i != 0), r = CX off V, b = <gamma*p, r>; the ODE's H = 0 where g*T'P = 0",
        Check(section, 1e-6, share=0.5),
    ),
    Statement(
        "gain-radial",
        5,
        "ctrans",
        "dt <P, r> = <g, dL/dg> for a residual's gains g, nGPT's steps and what hyper-connections write: 0 at a critical point",
        Check(radial, 1e-11, share=0.2),
    ),
    Statement(
        "depth-scaled-growth",
        6,
        "ctrans, on LayerNorm scaling",
        "pre with s_l = l^(-1/2), maps with |f(x)_i| <= a max_j |x_j|: |x_D| <= |x_0| + 4 dt a g sqrt(d D), where plain pre has D",
        Check(scaled_growth, share=0.2),
    ),
    Statement(
        "mean-stream",
        6,
        "ctrans, on mHC",
        "doubly stochastic mixing conserves the mean over the streams: it moves by dt mean(b) v a segment",
        Check(mean_stream, 1e-12, share=0.2),
    ),
    as_printed(
        "rezero-isometry",
        7,
        "ReZero, section 3; SkipInit",
        "at a = 0, with no norm around the state, X_D = X_0 and the Jacobian is the identity",
        Check(isometry, 0.0, share=0.1),
    ),
    Statement(
        "mixing-gain",
        7,
        "ctrans, on mHC and hyper-connections",
        "products of doubly stochastic M have |M_k ... M_0|_2 = 1: mixing lengthens no state and no costate; M = (1 + s) I: (1 + s)^k",
        Check(mixing, 1e-9, share=0.1),
        Check(twenty_rounds, 1e-3, share=0.1),
        "20 Sinkhorn rounds make M doubly stochastic (to 1e-3, of logits near 4 I)",
    ),
)
