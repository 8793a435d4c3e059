"""The Gramian: against Kalman's rank, dense Jacobians, Lyapunov's equation and the tangent kernel."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev

from ctrans.base.draw import Draw
from ctrans.control import controllability as of_control
from ctrans.control.controllability import Gramian, controllability, gramians
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.open_model import open_model
from ctrans.measure.walk import states_of
from ctrans.model.gpt import GPT
from ctrans.theory.section_05_controllability import linear_gramians, partly_controllable
from solvers import ConfigError, SolveError
from tests.helpers import small_config, small_model, tokens

TEXT = tokens(2, 6)
READ, TARGETS = TEXT[:, :-1], TEXT[:, 1:]
RANK_TOLERANCE = 1e-9


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stable(width, seed=0):
    """A matrix whose eigenvalues have negative real parts."""
    A = numbers(width, width, seed=seed)
    return A - (float(torch.linalg.eigvals(A).real.max()) + 0.5) * torch.eye(width).double()


# --- linear fields


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_gramians_rank_is_that_of_kalmans_matrix(rank, seed):
    A, B = partly_controllable(Draw(seed), 4, rank)
    A = A / np.linalg.norm(A, 2)
    kalman = np.concatenate([np.linalg.matrix_power(A.numpy(), k) @ B.numpy() for k in range(4)], 1)
    assert np.linalg.matrix_rank(kalman, RANK_TOLERANCE * np.linalg.norm(kalman)) == rank
    by_weights, by_velocity = linear_gramians(A, B, segments=6, h=1.0)
    assert by_weights.rank == rank
    assert by_velocity.rank == 4


def test_too_few_steps_do_not_control_a_chain():
    chain = torch.diag(torch.ones(3), -1).double()
    first = torch.eye(4, 1).double()
    ranks = [linear_gramians(chain, first, segments=k, h=1.0).weights.rank for k in (1, 2, 3, 4, 5)]
    assert ranks == [1, 2, 3, 4, 4]


def test_an_uncontrollable_direction_costs_nothing_in_the_gramian():
    A = torch.diag(double(-1.0, -2.0, -3.0))
    B = double(1.0, 0.0, 1.0).unsqueeze(-1)
    G = linear_gramians(A, B, segments=5, h=0.5).weights
    assert G.rank == 2
    assert (G.matrix[1] == 0).all()


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def lyapunov(A, B, horizon):
    """int_0^T e^(As) BB' e^(A's) ds = W - e^(AT) W e^(A'T), A W + W A' = -BB'."""
    A, B = A.numpy(), B.numpy()
    W = scipy.linalg.solve_continuous_lyapunov(A, -B @ B.T)
    flow = scipy.linalg.expm(A * horizon)
    return torch.from_numpy(W - flow @ W @ flow.T)


@pytest.mark.parametrize("controls", ["weights", "velocities"])
def test_small_steps_give_the_odes_gramian_with_order_one(controls):
    A, B, horizon = stable(3, seed=2), numbers(3, 2, seed=3), 1.5
    if controls == "velocities":
        exact = lyapunov(A, torch.eye(3).double(), horizon)
    else:
        exact = lyapunov(A, B, horizon)
    errors = []
    for segments in (20, 40, 80):
        h = horizon / segments
        G = getattr(linear_gramians(A, B, segments=segments, h=h), controls)
        errors.append(float((G.matrix / h - exact).norm() / exact.norm()))
    orders = [np.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert errors[-1] < 0.05
    assert orders == pytest.approx([1, 1], abs=0.15)


# --- dense algebra


def dense(depth, states, C):
    """C'WC of weights and of free velocities, segment by segment, from dense Jacobians."""
    parts = {"weights": [], "velocities": []}
    size = states[-1].numel()
    onward = torch.eye(size).double()
    for sublayer, h, x in reversed(
        list(zip(depth.sublayers, depth.lengths, states[:-1], strict=True))
    ):
        names = dict(sublayer.named_parameters())

        def step(weights, x, sublayer=sublayer, h=h):
            def moved(x):
                entered = sublayer.enter(x)
                return sublayer.moved(entered, sublayer(entered), h)

            holder = nn.Module()
            holder.sublayer = sublayer
            holder.forward = moved
            return functional_call(holder, {f"sublayer.{n}": w for n, w in weights.items()}, (x,))

        B = torch.cat([J.reshape(size, -1) for J in jacrev(step)(names, x).values()], -1)
        r = sublayer(x)
        T = jacrev(lambda r, x=x, sublayer=sublayer, h=h: sublayer.moved(x, r, h))(r)
        for kind, columns in (("weights", B), ("velocities", T.reshape(size, -1))):
            rows = C.flatten(1) @ onward @ columns
            parts[kind].insert(0, rows @ rows.mT)
        onward = onward @ jacrev(lambda x, step=step, names=names: step(names, x))(x).reshape(
            size, size
        )
    return {kind: torch.stack(several) for kind, several in parts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_the_gramian_is_that_of_dense_jacobians(placement):
    model = small_model(placement, depth=1, width=8, dt=0.5)
    x0 = model.embed(READ[:1, :3])
    C = numbers(4, *x0.shape)
    found = gramians(model.depth, x0, {"some": C})["some"]
    expected = dense(model.depth, states_of(model.depth, x0), C)
    torch.testing.assert_close(found.weights.parts, expected["weights"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.velocities.parts, expected["velocities"], rtol=1e-9, atol=0)


def test_a_free_velocity_moves_the_state_by_the_step_without_a_norm_around_it():
    model = small_model("peri", depth=2, dt=0.25)
    x0 = model.embed(READ[:1])
    C = numbers(3, *x0.shape)
    last = gramians(model.depth, x0, {"some": C})["some"].velocities.parts[-1]
    torch.testing.assert_close(last, 0.25**2 * C.flatten(1) @ C.flatten(1).mT)


@pytest.mark.parametrize("placement", ["pre", "peri", "post"])
def test_by_weights_it_is_the_tangent_kernel_of_the_depth(placement):
    model = small_model(placement, depth=2)
    found = controllability(model, READ, TARGETS, directions=5)
    weights = dict(model.depth.named_parameters())

    def outputs(weights):
        x = functional_call(model.depth, weights, (model.embed(READ),))
        logits = model.head(x).flatten(0, -2)
        losses = F.cross_entropy(logits, TARGETS.flatten(), reduction="none")
        last = logits[-1] - logits[-1].mean()
        return torch.cat([losses[list(found.places)], last[list(found.labels)]])

    J = torch.cat([of_weight.flatten(1) for of_weight in jacrev(outputs)(weights).values()], -1)
    kernel = J @ J.mT
    torch.testing.assert_close(found.tokens.weights.matrix, kernel[:5, :5])
    torch.testing.assert_close(found.classes.weights.matrix, kernel[5:, 5:])


# --- ranks, shares, directions


def test_two_equal_tokens_have_losses_that_cannot_move_apart():
    model = small_model("pre", context=16)
    read = TEXT[:1, :1].expand(2, 1)  # one token each, the same in both sequences
    found = controllability(model, read, TARGETS[:1, :1].expand(2, 1))
    assert found.tokens.weights.rank == 1
    assert found.tokens.velocities.rank == 2
    assert found.tokens.weights.eigenvalues[0].abs() < 1e-12 * found.tokens.weights.eigenvalues[1]


def test_the_ranks_do_not_depend_on_the_dtype():
    read = TEXT[:1, :1].expand(2, 1)
    for dtype in (torch.float32, torch.float64):
        model = small_model("peri", dtype=dtype)
        found = controllability(model, read, TARGETS[:1, :1].expand(2, 1))
        assert (found.tokens.weights.rank, found.tokens.velocities.rank) == (1, 2)


def test_shares_of_the_trace_sum_to_one_by_segment():
    model = small_model("pre", depth=2)
    found = controllability(model, READ, TARGETS)
    for family in (found.tokens, found.classes):
        for G in family:
            assert len(G.shares) == 4
            assert sum(G.shares) == pytest.approx(1)
            assert min(G.shares) > 0


def test_a_map_of_zeros_has_no_share():
    maps = [
        nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
        for _ in range(2)
    ]
    with torch.no_grad():
        for weight in maps[1].parameters():
            weight.zero_()
    depth = Depth([Sublayer(field, "ffn") for field in maps], 1.0, per_block=1)
    x = numbers(1, 3, 4)
    found = gramians(depth, x, {"some": numbers(2, 1, 3, 4)})["some"]
    assert found.weights.shares == pytest.approx([1, 0])


def test_a_gramian_of_zero_has_rank_and_shares_of_zero():
    G = Gramian(torch.zeros(2, 3, 3, dtype=torch.float64), 1e-15)
    assert G.rank == 0
    assert G.shares == [0, 0]


def test_masked_targets_are_no_directions_and_the_classes_are_of_the_last_counted_token():
    model = small_model("pre")
    targets = TARGETS.clone()
    targets[0, 0] = -100
    targets[1] = -1
    found = controllability(model, READ, targets)
    assert found.places == (1, 2, 3, 4)
    assert found.labels[0] == targets[0, 4]
    assert len(found.labels) == 8


def test_all_classes_but_one_are_directions():
    model = small_model("pre", vocab_size=11)
    found = controllability(model, READ, TARGETS, directions=50)
    assert len(found.labels) == len(set(found.labels)) == 10
    assert found.classes.velocities.rank == 10


def test_groups_of_weights_give_the_same_gramian(monkeypatch):
    model = small_model("peri", depth=1)
    whole = controllability(model, READ, TARGETS).tokens.weights.parts
    monkeypatch.setattr(of_control, "GRADIENTS", 1)
    monkeypatch.setattr(of_control, "AT_ONCE", 7)
    by_weight = controllability(model, READ, TARGETS).tokens.weights.parts
    torch.testing.assert_close(by_weight, whole)


def test_the_models_gradients_and_weights_stay():
    model = small_model("peri", depth=1).requires_grad_(True)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    controllability(model, READ, TARGETS)
    assert all(weight.grad is None for weight in model.parameters())
    assert all((weight == before[name]).all() for name, weight in model.named_parameters())


# --- other models and refusals


class OwnLoss(nn.Module):
    """A model whose loss is no cross-entropy."""

    def __init__(self):
        super().__init__()
        model = small_model("pre", depth=1)
        self.depth, self.embed, self.head = model.depth, model.embed, model.head

    def terminal_loss(self, x, targets):
        return x.square().mean()


def test_a_model_with_another_loss_is_refused():
    with pytest.raises(ConfigError, match="another loss than the cross-entropy"):
        controllability(OwnLoss(), READ, TARGETS)


def test_states_that_are_not_finite_are_an_error():
    model = small_model("pre", depth=1)
    with torch.no_grad():
        next(model.depth.parameters()).fill_(float("nan"))
    with pytest.raises(SolveError, match="not finite"):
        controllability(model, READ, TARGETS)


def test_half_precision_has_no_rank():
    with pytest.raises(ConfigError, match="give float32"):
        controllability(small_model("pre", depth=1, dtype=torch.bfloat16), READ, TARGETS)


def test_gains_of_zero_leave_one_control_for_each_segment():
    """ReZero before training: maps have no effect, and each gain moves the state along one map."""
    model = GPT(small_config("pre", depth=2, residual="rezero")).double()
    found = controllability(model, READ, TARGETS)
    assert found.tokens.weights.rank == 4
    assert found.tokens.velocities.rank == 8


@pytest.mark.parametrize("depth_weights", ["constant", "chebyshev"])
def test_weights_that_are_functions_of_depth_count_by_their_values(depth_weights):
    model = small_model("pre", depth=2, depth_weights=depth_weights)
    found = controllability(model, READ, TARGETS)
    assert min(found.tokens.weights.shares) > 0


@pytest.mark.parametrize("directions", [0, -1, 1.5])
def test_a_number_of_directions_is_positive(directions):
    with pytest.raises(ConfigError, match="directions"):
        controllability(small_model("pre", depth=1), READ, TARGETS, directions=directions)


@pytest.mark.slow  # it imports transformers
def test_an_opened_gpt2_has_gramians():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=24, n_layer=2, n_head=4, n_positions=32, eos_token_id=2
    )
    model = open_model(transformers.GPT2LMHeadModel(config))
    found = controllability(model, READ, TARGETS, directions=4)
    assert found.tokens.weights.rank == found.tokens.velocities.rank == 4
    assert found.classes.weights.rank == 4
