"""Section 11: how far AdamW can move weights, states and losses, whatever the gradients are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from ctrans.base.draw import Draw
from ctrans.dynamics.norm import RMSNorm
from ctrans.theory.random_models import describe_model, random_model, random_text
from ctrans.theory.statement import Printed, Trial, Trials, at_most, equal, not_none, statement

SECTION = 11

OUTPUT = ("peri", "output")


def adam_factor(beta1: float, beta2: float, step: int) -> float:
    """c_t, the largest |m_t/sqrt(v_t)| over all sequences of gradients, at step t = 1, 2, ..., for
    bias-corrected moments and eps = 0.

    c_t = (1 - beta1)/(1 - beta1^t) sqrt((1 - beta2^t)/(1 - beta2)) sqrt((1 - q^t)/(1 - q)), q =
    beta1^2/beta2 < 1, by the inequality of Cauchy and Schwarz. It is reached for g_i ~
    (beta1/beta2)^(t-i). c_1 = 1; c_t tends to (1 - beta1)/sqrt((1 - beta2)(1 - q)), which is 2.35
    for betas 0.9 and 0.99, and 7.3 for 0.9 and 0.999.
    """
    q = beta1**2 / beta2
    bias_correction = (1 - beta1) / (1 - beta1**step) * math.sqrt((1 - beta2**step) / (1 - beta2))
    return bias_correction * math.sqrt((1 - q**step) / (1 - q))


def adam_reach(rates: Sequence[float], beta1: float, beta2: float) -> float:
    """sum_t eta_t c_t: the largest change of a weight by steps of Adam at these rates."""
    return sum(rate * adam_factor(beta1, beta2, t) for t, rate in enumerate(rates, 1))


def _adam_moves(
    gradients: Float[Tensor, " steps"], rates: Sequence[float], beta1: float, beta2: float
) -> Float[Tensor, " steps"]:
    """The steps that torch's Adam makes of one weight for these gradients."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=rates[0], betas=(beta1, beta2), eps=0.0)
    weights = [0.0]
    for gradient, rate in zip(gradients, rates, strict=True):
        adam.param_groups[0]["lr"] = rate
        weight.grad = gradient.reshape(1)
        adam.step()
        weights.append(float(weight.detach()))
    return torch.tensor(weights, dtype=torch.float64).diff()


@statement(
    "adam-step",
    "ctrans, on Kingma and Ba, section 2.1",
    "a step of Adam moves a weight by at most eta c_t, c_t by Cauchy and Schwarz: 2.35 eta in the"
    " end for betas 0.9, 0.99",
    share=0.2,
    printed=Printed("by at most eta max(1, (1 - beta1)/sqrt(1 - beta2))"),
)
def step_of_adam(draw: Draw, *, printed: bool) -> Trials:
    """|dw| <= eta c_t for random gradients, with equality for g_i = (beta1/beta2)^(t-i).

    Printed: |dw| <= eta max(1, (1 - beta1)/sqrt(1 - beta2)), for the second sequence.
    """
    beta1, beta2 = draw.choice(((0.9, 0.99), (0.9, 0.999), (0.9, 0.95), (0.5, 0.9)))
    steps = 2 + draw.integer(30)
    rate = draw.log_uniform(-4, 0)
    worst_gradients = (beta1 / beta2) ** torch.arange(steps - 1, -1, -1, dtype=torch.float64)
    at_worst = float(_adam_moves(worst_gradients, [rate] * steps, beta1, beta2)[-1].abs())
    case = f"step {steps} of Adam, betas {beta1} and {beta2}, over its rate"
    if printed:
        return at_most(at_worst / rate, max(1.0, (1 - beta1) / math.sqrt(1 - beta2)), case)
    moves = _adam_moves(draw.log_uniform(-3, 3) * draw.normal(steps), [rate] * steps, beta1, beta2)
    bounds = [adam_factor(beta1, beta2, t) for t in range(1, steps + 1)]
    trials = [
        at_most(float(move.abs()) / rate, bound, case)
        for move, bound in zip(moves, bounds, strict=True)
    ]
    return [*trials, equal(at_worst / rate, bounds[-1], f"{case}, for the worst gradients")]


@statement(
    "reach-of-training",
    "ctrans",
    "behind output norms and plain sums AdamW with rates eta_t moves X_D at most T (g + b + 2 sum_t"
    " eta_t c_t) from X_0 (rms), whatever the gradients are, for eta_t times the weight decay up"
    " to 2",
    share=0.1,
)
def reach_of_training(draw: Draw) -> Trials:
    """rms(X_D - X_0) <= sum_k h_k (g_k + b_k + 2 sum_t eta_t c_t) after steps of torch's AdamW with
    random gradients, peri or output. One step of Adam reaches it where all maps give the same
    signs, and gains and offsets grow with them.

    Beyond eta_t decay = 2 the decay alone makes a weight larger: it multiplies it by 1 - eta_t
    decay.
    """
    model = random_model(draw, draw.choice(OUTPUT))
    norms = [not_none(part.output_norm) for part in model.depth.sublayers]
    rates = [draw.log_uniform(-3, 0) for _ in range(1 + draw.integer(6))]
    betas = draw.choice(((0.9, 0.99), (0.9, 0.999)))
    reach = adam_reach(rates, *betas)
    bound = sum(
        h * (norm.level + 2 * reach) for h, norm in zip(model.depth.lengths, norms, strict=True)
    )
    adam = torch.optim.AdamW(
        model.requires_grad_().parameters(),
        betas=betas,
        weight_decay=draw.choice((0.0, 0.1)),
        eps=0.0,
    )
    for rate in rates:
        adam.param_groups[0]["lr"] = rate
        for weight in model.parameters():
            weight.grad = draw.normal(*weight.shape) * draw.log_uniform(-3, 3)
        adam.step()
    with torch.no_grad():
        x0 = model.embed(random_text(draw))
        moved = (model.depth(x0) - x0).square().mean().sqrt()
    return [
        at_most(moved, bound, f"rms(X_D - X_0) after {len(rates)} steps, {describe_model(model)}"),
        _reached(draw, rates[0]),
    ]


def _reached(draw: Draw, rate: float) -> Trial:
    """The case that reaches the bound: the maps are constant vectors of signs with mean 0."""
    model = random_model(draw, "peri", norm="layernorm", spread=0, eps=0.0)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(model.config.width // 2)
    adam = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, eps=0.0)
    for sublayer in model.depth.sublayers:
        out = sublayer.field.output_projection
        norm = not_none(sublayer.output_norm)
        out.weight.zero_()
        out.bias.copy_(signs)
        norm.gamma.grad = -torch.ones_like(signs)
        norm.beta.grad = -signs
    adam.step()
    x0 = draw.normal(1, 3, model.config.width)
    moved = (model.depth(x0) - x0).square().mean().sqrt()
    return equal(moved, model.depth.times[-1] * (1 + 2 * rate), "rms(X_D - X_0) of constant signs")


@statement(
    "common-step",
    "ctrans",
    "where fields are constant and the loss is linear in X_D, Adam on the output norms' offsets"
    " moves all tokens alike, by T sum_t eta_t (rms)",
    1e-9,
    0.1,
)
def common_step(draw: Draw) -> Trials:
    """X_D - X_D before has rms T sum_t eta_t and is the same for all tokens, after steps of torch's
    Adam on the offsets of `peri` with maps of weight 0; L = mean over tokens of <X_D, vector>.

    Then dL/d offset_k = h_k vector at all depths and steps, and each step is -eta_t sign(vector).
    Another loss also moves all tokens alike, but less far once its gradient turns.
    """
    model = random_model(draw, "peri", norm="layernorm", depth=1 + draw.integer(4))
    for sublayer in model.depth.sublayers:
        sublayer.field.output_projection.weight.zero_()
    offsets = [not_none(part.output_norm).beta.requires_grad_() for part in model.depth.sublayers]
    x0 = draw.normal(2, 3, model.config.width)
    vector = draw.normal(model.config.width)
    before = model.depth(x0).detach()
    rates = [draw.log_uniform(-3, 0) for _ in range(1 + draw.integer(6))]
    adam = torch.optim.Adam(offsets, eps=0.0)
    for rate in rates:
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        with torch.enable_grad():
            (model.depth(x0) @ vector).mean().backward()
        adam.step()
    moved = model.depth(x0).detach() - before
    case = f"the common move, {describe_model(model)}"
    common = moved.mean((0, 1))
    return [
        equal(moved, common.expand_as(moved), case),
        equal(common, -model.depth.times[-1] * sum(rates) * vector.sign(), case),
    ]


@statement(
    "common-floor",
    "ctrans",
    "logits within delta of those of one common vector leave a mean loss of at least H(q) - 2"
    " delta, q the frequencies of the targets",
)
def floor_of_common_logits(draw: Draw) -> Trials:
    """H(q) - L <= 2 delta for random logits l + delta_j, |delta_j| <= delta, and random targets.
    In 300 classes +delta at the target and -delta elsewhere reaches it to 1%.
    """
    classes = 2 + draw.integer(20)
    tokens = 1 + draw.integer(50)
    delta = draw.log_uniform(-3, 1)
    targets = (draw.unit(tokens) ** 3 * classes).long()
    logits = 3 * draw.normal(classes) + delta * (2 * draw.unit(tokens, classes) - 1)
    small = 1e-4
    all_classes = torch.arange(300)
    best = small * (2 * torch.eye(300, dtype=torch.float64) - 1)
    return [
        at_most(
            _entropy(targets, classes) - cross_entropy(logits, targets),
            2 * delta,
            f"H(q) - L, delta {delta:.3g}",
        ),
        at_most(
            2 * small * 0.99,
            math.log(300) - float(cross_entropy(best, all_classes)),
            "99% of 2 delta against H(q) - L",
        ),
    ]


@statement(
    "common-state-floor",
    "ctrans",
    "behind a final RMSNorm L >= H(q) - a, a = 2 sqrt(d) max_v |gamma w_v| max_j |s_j|/(|m| +"
    " |x_j|) <= 1, for states x_j = m + s_j",
)
def floor_of_common_states(draw: Draw) -> Trials:
    """w_v are the rows of the head, R = max |gamma w_v|. By the inequality of Dunkl and Williams
    for x/|x| each state is within a/R of m's. The loss is convex in the logits: at p = softmax of
    m's, L >= H(q) + KL - (a/R) sum_t q_t |w_t - w_p|, w_p = sum p_v w_v. The sum is at most
    sqrt(R^2 + |w_q - w_p|^2), and |w_q - w_p|^2 <= 2 R^2 KL (Pinsker): L >= H(q) - a + (1 - a) KL.

    Two equally frequent classes with opposite rows reach the bound, to 1%.
    """
    width = 2 + draw.integer(10)
    classes = 2 + draw.integer(20)
    tokens = 1 + draw.integer(50)
    norm = RMSNorm(width, 0.0).double().requires_grad_(requires_grad=False)
    norm.gamma.copy_(draw.normal(width))
    head = draw.normal(classes, width)
    common = draw.normal(width)
    x = common + draw.log_uniform(-4, 1) * draw.normal(tokens, width)
    targets = (draw.unit(tokens) ** 3 * classes).long()
    rows = float((head * norm.gamma).norm(dim=1).max()) * math.sqrt(width)
    a = draw.uniform(0.01, 1)
    turn = float(((x - common).norm(dim=1) / (common.norm() + x.norm(dim=1))).max())
    head *= a / (2 * rows * turn)
    gained = _entropy(targets, classes) - cross_entropy(norm(x) @ head.T, targets)
    small = 1e-3
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    # m = (1, 0), s = (0, +-small)
    pair = torch.stack([torch.ones(2, dtype=torch.float64), small * signs], dim=1)
    unit = RMSNorm(2, 0.0).double().requires_grad_(requires_grad=False)
    rows_of_pair = torch.stack([torch.zeros(2, dtype=torch.float64), signs], dim=1)
    attained = math.log(2) - cross_entropy(unit(pair) @ rows_of_pair.T, torch.arange(2))
    return [
        at_most(gained, a, f"H(q) - L, {tokens} tokens, width {width}"),
        at_most(
            0.99 * 2 * math.sqrt(2) * small / (1 + math.sqrt(1 + small**2)),
            attained,
            "99% of a against H(q) - L",
        ),
    ]


def _entropy(targets: Int[Tensor, " tokens"], classes: int) -> float:
    """H(q) in nats, q the frequencies of the targets."""
    q = torch.bincount(targets, minlength=classes).double() / len(targets)
    return float(torch.special.entr(q).sum())
