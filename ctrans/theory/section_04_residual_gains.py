"""Section 4: H with a residual's gains, steps towards an image, and streams."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.control.regularization import Regularization
from ctrans.control.residual_pullback import certify_towards_image
from ctrans.control.sets_by_norm import image_of
from ctrans.dynamics.norm import SphereNorm
from ctrans.theory.payoffs import largest_payoff, none_better, payoff
from ctrans.theory.random_models import describe_model, random_model
from ctrans.theory.random_norms import random_norm
from ctrans.theory.statement import Trial, Trials, at_most, equal, holds_if, not_none, statement

SECTION = 4


@statement(
    "residual-pullback",
    "ctrans",
    "velocities W v, W linear (gains by channel, streams written to): H(P) is that of the v at W'P,"
    " attained at W v*",
    1e-12,
)
def pullback(draw: Draw) -> Trials:
    """H over {W v} at P is H over the v at W'P: its maximiser attains it, and 30 outputs through
    the sublayer's W do not exceed it.
    """
    residual = draw.choice(("layerscale", "rezero", "hyper_connections", "mhc"))
    model = random_model(draw, draw.choice(("peri", "output")), residual=residual, eps=0.0)
    sublayer = draw.choice(model.depth.sublayers)
    norm = not_none(sublayer.output_norm)
    P = draw.rows(8 * model.config.state_streams)
    q = sublayer.pulled(P)
    x = torch.zeros_like(P)
    image = image_of(norm)
    H = float(image.support(q))
    best = sublayer.joined(image.maximizer(q), x)
    outputs = torch.stack([sublayer.joined(norm(draw.normal(len(P), 8)), x) for _ in range(30)])
    scale = P.norm() * best.norm()
    return [
        equal(payoff(P, best), H, f"{residual}, {describe_model(model)}", scale),
        none_better(P, outputs, H, scale, "the best of 30 outputs against H"),
    ]


def _scaled(
    draw: Draw, name: str, least: int = 2
) -> tuple[SphereNorm, Tensor, float, list[float], float]:
    """A norm, P, a bound R, the values of H at g * P for all gains g_i = +-R (256 for eight
    channels), and R H(P).
    """
    norm = random_norm(draw, name, width=least + draw.integer(5))
    P = draw.rows(norm.width, 3)
    R = draw.log_uniform(-1, 1)
    signs = torch.cartesian_prod(*[torch.tensor([-R, R], dtype=torch.float64)] * norm.width)
    return (
        norm,
        P,
        R,
        _supports(norm, [g * P for g in signs]),
        R * float(image_of(norm).support(P)),
    )


def _supports(norm: SphereNorm, costates: list[Tensor]) -> list[float]:
    image = image_of(norm)
    return [float(image.support(P)) for P in costates]


@statement(
    "residual-gain",
    "ctrans, on LayerScale",
    "gains |g_i| <= R by channel, trained behind RMSNorm: H = R H(P); behind LayerNorm at least"
    " that",
    1e-9,
    0.2,
    printed="the same R H(P) behind LayerNorm",
)
def gain_by_channel(draw: Draw, *, printed: bool) -> Trials:
    """RMSNorm: every corner of the box has R H(P), 30 gains inside have no more. LayerNorm: the
    best corner is between R H(P) and the bound.

    Printed: R H(P) for LayerNorm against the best corner of the box.
    """
    if printed:
        norm, _, _, values, H = _scaled(draw, "layernorm", 4)
        return at_most(
            max(values),
            H,
            f"LayerNorm, d = {norm.width}: the best gains with |g_i| <= R against R H(P)",
        )
    norm, P, R, values, H = _scaled(draw, "rmsnorm")
    scale = R * float(largest_payoff(P, image_of(norm).maximizer(P)))
    inside = [draw.uniform(-R, R) * P for _ in range(5)]
    inside += [R * (2 * draw.unit(norm.width) - 1) * P for _ in range(25)]
    layernorm, Q, S, corners, least = _scaled(draw, "layernorm")
    bound = S * float(
        math.sqrt(layernorm.width) * (layernorm.gamma * Q).norm(dim=-1).sum()
        + (Q.sum(0).abs() * layernorm.beta.abs()).sum()
    )
    return [
        equal(torch.tensor(values, dtype=torch.float64), H, f"corners, d = {norm.width}", scale),
        Trial((max(_supports(norm, inside)) - H) / scale, "gains inside the box against R H(P)"),
        at_most(
            max(corners),
            bound,
            f"LayerNorm, d = {layernorm.width}: the best corner against the bound",
        ),
        Trial((least - max(corners)) / bound, "LayerNorm: R H(P) against the best corner"),
    ]


@statement(
    "residual-one-gain",
    "ctrans, on ReZero and SkipInit",
    "one gain |a| <= R, trained behind an output norm: H = R max(H(P), H(-P)), so +inf over all a"
    " where P is not a tie",
    1e-12,
)
def one_gain(draw: Draw) -> Trials:
    """max over 41 values of |a| <= R of H(a P) is R max(H(P), H(-P)), and ten times the bound has
    ten times that.
    """
    norm = random_norm(draw)
    P = draw.rows(norm.width, 3)
    R = draw.log_uniform(-1, 1)

    def most(bound: float) -> float:
        return max(
            _supports(norm, [a * P for a in torch.linspace(-bound, bound, 41, dtype=torch.float64)])
        )

    H = R * max(_supports(norm, [-P, P]))
    scale = R * float(largest_payoff(P, image_of(norm).maximizer(P)))
    return [
        equal(most(R), H, f"d = {norm.width}, {len(P)} tokens", scale),
        equal(most(10 * R), 10 * H, "ten times the bound", 10 * scale),
    ]


@statement(
    "towards-image",
    "ctrans, on nGPT",
    "dX/dt = T_X a * (N f - X): H = H_N(Q) + <Q, X>, Q = a * T_X'P, finite for the steps a and"
    " gains as they are, and attained",
    1e-9,
    0.2,
)
def towards_image(draw: Draw) -> Trials:
    """H_N(Q) + <Q, X>: the closed form's maximiser attains it through the sublayer, and 30 outputs
    do not exceed it.
    """
    model = random_model(draw, draw.choice(("post", "pre_post")), residual="ngpt", eps=0.0)
    sublayer = draw.choice(model.depth.sublayers)
    around = not_none(sublayer.state_norm)
    image = not_none(sublayer.image)
    residual = sublayer.residual
    P = draw.rows(8, 3)
    X = around(draw.normal(1, 8))
    X = X.expand_as(P).contiguous()
    H = certify_towards_image(sublayer, X, P, draw.normal(len(P), 16), Regularization()).hamiltonian
    q = sublayer.pulled(torch.func.vjp(lambda f: around.tangent(X, f), P)[1](P)[0])
    toward = image_of(image).maximizer(q)
    best = around.tangent(X, residual.pull(toward - X))
    outputs = torch.stack(
        [around.tangent(X, sublayer.joined(draw.normal(*P.shape), X)) for _ in range(30)]
    )
    scale = q.norm() * (X.norm() + toward.norm())
    return [
        equal(payoff(P, best), H, describe_model(model), scale),
        none_better(P, outputs, H, scale, "the best of 30 outputs against H"),
    ]


@statement(
    "residual-section",
    "ctrans, on LayerScale with gains of 0",
    "around the state, gains 0 in some channels: sup <p, N(X + dt g*f)> = sqrt(d)(|a|^2 + max(0,"
    " b)^2/|r|^2)^(1/2) + <p, beta>, a the part of gamma*p in V = C span(e_i: g_i != 0), r = CX off"
    " V, b = <gamma*p, r>; the ODE's H = 0 where g*T'P = 0",
    1e-6,
    0.5,
)
def section(draw: Draw) -> Trials:
    """Zero gains in some channels, inside a norm around the state: the step's support in closed
    form, and the ODE's costates of H = 0.

    N(X + dt g * f) = beta + sqrt(d) gamma * C y/|C y|, C y = r + v: v is any vector of V = C
    span(e_i : g_i != 0), r the part of C X orthogonal to V. <q, v + r>/|v + r|, q = gamma * p, is
    largest at v = a |r|^2/b, a the part of q in V and b = <q, r> > 0. For b <= 0 long v only
    approach |a|.
    """
    norm = random_norm(draw, width=3 + draw.integer(6))
    d = norm.width
    dt = draw.log_uniform(-2, 0)
    p = draw.normal(d)
    X = draw.normal(d)
    g = torch.where(torch.arange(d) < 1 + draw.integer(d - 1), 0.5 + draw.unit(d), 0.0)
    g = g[torch.randperm(d, generator=draw.generator)]
    moving = int((g != 0).sum())
    at = norm.retract(X)
    moving_axes = torch.eye(d, dtype=torch.float64)[g != 0]
    basis = torch.linalg.svd(norm.centre(moving_axes).T, full_matrices=False)
    V = basis.U[:, basis.S > 1e-9]
    q = norm.gamma * p
    centred = norm.centre(X)
    r = centred - V @ (V.T @ centred)
    if not float(r.norm()) > 1e-9 * float(centred.norm()):  # 0 but for rounding: V has full rank
        r = torch.zeros_like(r)
    a = V.T @ q
    b = float(q @ r)
    if b > 0:
        beside = b**2 / float(r @ r)
        length = float(r @ r) / b
    else:
        beside = 0.0
        length = 1e8 * float(X.norm() / a.norm())
    H = math.sqrt(d) * math.sqrt(float(a @ a) + beside) + float(p @ norm.beta)
    v = V @ a * length
    # some f has C(X + dt g * f) = v + r, as these channels span V
    of_f = dt * norm.centre(torch.diag(g)).T
    f = torch.linalg.lstsq(of_f, (v + r - centred).unsqueeze(-1), driver="gelsd").solution[:, 0]
    raw = draw.log_uniform(-1, 5) * draw.normal(300, d)
    scale = math.sqrt(d) * float(q.norm())
    A = torch.stack([norm.tangent(at, g * e) for e in torch.eye(d, dtype=torch.float64)], -1)
    idle = torch.linalg.svd(A.T).Vh[int(torch.linalg.matrix_rank(A)) :]
    outputs = g * draw.normal(30, d)
    moved = norm.tangent(at.expand_as(outputs), outputs)
    case = f"{type(norm).__name__}, d = {d}, {moving} channels move"
    return [
        equal(norm(X + dt * g * f) @ p, H, f"{case}: the best output", scale),
        Trial(
            (float((norm(X + dt * g * raw) @ p).max()) - H) / scale,
            f"{case}: 300 outputs against the support",
        ),
        Trial(
            float((moved @ idle.T).abs().max()) / float(moved.norm()),
            f"{case}: a costate that T' takes to channels without gain",
        ),
        holds_if(
            f"{case}: costates of H = 0, of at least as many dimensions as channels stand",
            condition=len(idle) >= d - moving,
        ),
    ]
