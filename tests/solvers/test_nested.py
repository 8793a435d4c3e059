"""States of several tensors: the same equation as one flat tensor, in every structure, with every
method and kind of gradient.
"""

from collections import OrderedDict, namedtuple

import pytest
import torch

from solvers import (
    METHODS,
    ConfigError,
    Event,
    RungeKutta,
    Segment,
    SolveError,
    StepControl,
    odeint,
    solve,
)
from solvers.tree import Tree, leaves, mapped

OWN = [name for name, method in METHODS.items() if isinstance(method, RungeKutta)]
Pair = namedtuple("Pair", ["place", "speed"])
PLACE = torch.tensor([[0.3, -0.8], [0.5, 1.1]], dtype=torch.float64)
SPEED = torch.tensor([0.2, 0.7, -0.4], dtype=torch.float64)
STRUCTURES = {
    "tuple": (lambda a, b: (a, b), lambda s: s),
    "list": (lambda a, b: [a, b], tuple),
    "dict": (lambda a, b: {"b": b, "a": a}, lambda s: (s["a"], s["b"])),
    "ordered": (lambda a, b: OrderedDict(x=a, y=b), lambda s: (s["x"], s["y"])),
    "named": (Pair, lambda s: (s.place, s.speed)),
    "nested": (
        lambda a, b: {"all": [(a,), {"other": Pair(b, ())}]},
        lambda s: (s["all"][0][0], s["all"][1]["other"].place),
    ),
}


def rates(t, a, b, w):
    return -w * a * b.sum() + torch.cos(t), torch.sin(a.sum()) - w * b


def flat_field(w):
    def field(t, x):
        a, b = rates(t, x[:4].view(2, 2), x[4:], w)
        return torch.cat([a.reshape(-1), b])

    return field


def request_for(method, kind="backprop"):
    return {
        "method": method,
        "gradient": kind,
        **({"rtol": 1e-6, "atol": 1e-6} if METHODS[method].adaptive else {"steps": 8}),
    }


def both(structure, request, **maps):
    """(solution of the structure, of the flat state), each with the gradients of a loss of all
    saved states in w, place and time.
    """
    make, take = STRUCTURES[structure]
    found = []
    for nested in (True, False):
        w, a, b, end = (
            v.clone().requires_grad_()
            for v in (torch.tensor(0.7).double(), PLACE, SPEED, torch.tensor(1.3).double())
        )

        def field(t, s, w=w):
            return make(*rates(t, *take(s), w))

        chosen = field if nested else flat_field(w)
        segments = [Segment(0, 0.6, chosen), Segment(0.6, end, chosen)]
        start = make(a, b) if nested else torch.cat([a.reshape(-1), b])
        norm = (
            {}
            if nested or not METHODS[request["method"]].adaptive
            else {"step_control": StepControl(norm=largest_rms)}
        )
        solution = solve(segments, start, save="segments", **norm, **request)
        states = [
            torch.cat([p.reshape(-1) for p in take(s)]) if nested else s for s in solution.states
        ]
        loss = sum(((i + 1) * state.square()).sum() for i, state in enumerate(states))
        found.append((solution, states, torch.autograd.grad(loss, (w, a, b, end))))
    return found


def largest_rms(e):
    """Of each tensor of the flat state (of state and costate where there are both)."""
    return max(e[..., :4].square().mean().sqrt(), e[..., 4:].square().mean().sqrt())


@pytest.mark.cases(8)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("method", OWN)
def test_a_structure_is_its_flat_state(method, structure):
    (mine, states, found), (other, right, expected) = both(structure, request_for(method))
    assert type(mine.x1) is type(STRUCTURES[structure][0](PLACE, SPEED))
    assert mine.stats == other.stats
    for a, b in zip([*states, *found], [*right, *expected], strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["checkpoint", "reversible", "adjoint"])
@pytest.mark.parametrize("method", ["rk4", "tsit5", "torchdiffeq:dopri5"])
def test_every_kind_of_gradient_has_it(method, kind):
    if kind == "reversible" and method.startswith("torchdiffeq:"):
        pytest.skip("it has none")
    (_, states, found), (_, right, expected) = both("nested", request_for(method, kind))
    for a, b in zip([*states, *found], [*right, *expected], strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_projections_events_callbacks_times_and_norms_meet_the_structure():
    seen = []

    def field(t, s):
        return {"place": s["speed"], "speed": -s["place"]}

    def halved(s):
        seen.append(set(s))
        return {"speed": s["speed"] / 2, "place": s["place"]}

    def norm(e):
        seen.append(set(e))
        return e["place"].abs().max() + e["speed"].abs().max()

    start = {"place": torch.ones(2).double(), "speed": torch.zeros(2).double()}
    request = {
        "method": "tsit5",
        "rtol": 1e-9,
        "atol": 1e-9,
        "step_control": StepControl(norm=norm),
    }
    ended = solve(
        [Segment(0, 9, field)],
        start,
        events=Event(lambda t, s: s["place"][0]),
        on_step=lambda t, s: seen.append(set(s)),
        **request,
    )
    assert float(ended.event_time) == pytest.approx(torch.pi / 2, abs=1e-8)
    assert ended.x1["speed"].tolist() == pytest.approx([-1, -1], abs=1e-8)
    inside = solve([Segment(0, 1, field)], start, times=[0.2, 0.7], **request)
    assert [float(s["place"][0]) for s in inside.states] == pytest.approx(
        [0.9800665778, 0.7648421873], abs=1e-8
    )
    entered = solve(
        [Segment(0, 0.1, field), Segment(0.1, 0.2, field, enter=halved, project=halved)],
        start,
        method="euler",
    )
    # by hand: 1 - 0.01 of the slope -0.1 halved, which is halved again after the step
    assert float(entered.x1["speed"][0]) == pytest.approx((-0.05 - 0.1) / 2)
    assert seen
    assert all(keys == {"place", "speed"} for keys in seen)
    with pytest.raises(SolveError) as caught:
        solve([Segment(0, 1, lambda t, s: mapped(lambda x: x / 0, s))], start, method="rk4")
    assert caught.value.solution.x1.keys() == start.keys()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["rms", "token", "max"])
def test_a_norm_by_name_is_the_largest_of_the_tensors(name):
    # one entry that moves among 10,000 that rest is hidden in their tensor, and not beside it
    def field(t, s):
        return mapped(lambda x: torch.cos(9 * t) * x, s)

    still, fast = torch.zeros(10_000).double(), torch.ones(1).double()
    request = {
        "method": "tsit5",
        "rtol": 1e-6,
        "atol": 1e-6,
        "step_control": StepControl(norm=name),
    }
    alone = solve([Segment(0, 2, field)], fast, **request).stats
    beside = solve([Segment(0, 2, field)], (still, fast), **request).stats
    hidden = solve([Segment(0, 2, field)], torch.cat([still, fast]), **request).stats
    assert beside == alone
    assert (hidden.accepted < alone.accepted) is (name != "max")


@pytest.mark.cases(2)
@pytest.mark.parametrize("method", ["dopri8", "explicit_adams", "rk4"])
def test_odeint_takes_structures_for_all_methods(method):
    t = torch.linspace(0, 1, 5).double()
    right = odeint(flat_field(0.7), torch.cat([PLACE.reshape(-1), SPEED]), t, method=method)
    for name, (make, take) in STRUCTURES.items():
        found = odeint(
            lambda t, s, m=make, k=take: m(*rates(t, *k(s), 0.7)),
            make(PLACE, SPEED),
            t,
            method=method,
        )
        a, b = take(found)
        # torchdiffeq's own steps for a tuple follow its largest tensor
        close = 1e-3 if name == "tuple" and method != "rk4" else 1e-12
        assert torch.allclose(torch.cat([a.reshape(5, 4), b], 1), right, rtol=close, atol=close)


def test_vmap_over_structures():
    def end(a, b):
        segments = [
            Segment(0, 1, lambda t, s: dict(zip("ab", rates(t, s["a"], s["b"], 0.7), strict=True)))
        ]
        return solve(segments, {"a": a, "b": b}, method="rk4", steps=4).x1

    found = torch.func.vmap(end)(torch.stack([PLACE, 2 * PLACE]), torch.stack([SPEED, -SPEED]))
    for i, (a, b) in enumerate([(PLACE, SPEED), (2 * PLACE, -SPEED)]):
        right = end(a, b)
        assert all(torch.allclose(found[key][i], right[key]) for key in "ab")


@pytest.mark.parametrize(
    ("state", "field", "words"),
    [
        ({}, lambda t, s: s, "the initial state is dict"),
        ({"a": 1.0}, lambda t, s: s, "the initial state is dict: give a tensor, or tuples"),
        ((torch.ones(2), torch.ones(2).double()), lambda t, s: s, "several types or devices"),
        ((torch.ones(2), torch.ones(2) * 1j), lambda t, s: s, "several types or devices"),
        ((torch.ones(0), torch.ones(0)), lambda t, s: s, "non-empty"),
        ((torch.ones(2).long(),), lambda t, s: s, "floating or complex type"),
        (
            {"a": torch.ones(2)},
            lambda t, s: {"b": s["a"]},
            "the field returned dict for a state of 1 tensors: return the same structure",
        ),
        ({"a": torch.ones(2)}, lambda t, s: {"a": s["a"], "b": 1}, "the field returned dict"),
        ([torch.ones(2)], lambda t, s: (s[0],), "the field returned tuple"),
        ((torch.ones(2),), lambda t, s: s[0], "the field returned Tensor"),
        ((torch.ones(2),), lambda t, s: (s[0][:1],), "the same shapes"),
        ((torch.ones(2),), lambda t, s: ((s[0],),), "the field returned tuple"),
        (
            (torch.ones(2),),
            lambda t, s: (s[0].double(),),
            "returned float64 for a state of float32",
        ),
    ],
)
def test_structures_that_do_not_fit_are_named(state, field, words):
    with pytest.raises(ConfigError, match=words):
        solve([Segment(0, 1, field)], state, method="rk4")


def test_flat_and_parts_undo_each_other_and_leave_the_state_alone():
    for make, _ in STRUCTURES.values():
        state = make(PLACE, SPEED)
        tree = Tree(state)
        again = tree.parts(tree.flat("it", state))
        assert type(again) is type(state)
        assert all(map(torch.equal, leaves(again), leaves(state)))
        stacked = tree.parts(torch.stack([tree.flat("it", state)] * 3))
        assert [part.shape for part in leaves(stacked)] == [
            (3, *part.shape) for part in leaves(state)
        ]
