"""Arguments checked against annotations: what is right passes, what is wrong is named, and a check
costs little.
"""

import collections
import enum
import functools
import inspect
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad, vmap

import ctrans
import ctrans.control
import ctrans.interop
import solvers
from ctrans.base.option import NOT_NEGATIVE, Count
from ctrans.training import monitor
from solvers import (
    PI,
    AnyFloat,
    Cautious,
    ConfigError,
    Finite,
    Segment,
    checked,
    look_up,
    odeint,
    odeint_adjoint,
    odeint_dense,
    odeint_event,
    solve,
    tableau,
)
from solvers.checked import _checks


class Word(str):
    """A text of a class of its own."""


class Name(enum.StrEnum):
    PRE = "pre"


@runtime_checkable
class HasSize(Protocol):
    size: int


class Sized:
    size = 3


RIGHT = [
    (int, [3, np.int64(3), np.uint8(3), torch.tensor(3), np.array(3), -(10**400)]),
    (
        float,
        [
            3,
            0.5,
            np.float32(0.5),
            np.float64(0.5),
            Fraction(1, 3),
            torch.tensor(0.5),
            np.array(0.5),
        ],
    ),
    (AnyFloat, [math.inf, -math.inf, math.nan, np.float32(math.nan), 1]),
    (complex, [1j, 1.0, 2]),
    (bool, [True, np.True_, 0, 1]),
    (str, ["x", Word("x"), Name.PRE, np.str_("x")]),
    (bytes, [b"x", bytearray(b"x"), memoryview(b"x")]),
    (str | Path, ["x", Path("x"), Word("x"), next(os.scandir("/"))]),
    (Literal["pre", "post"], ["pre", Name.PRE, np.str_("post")]),
    (
        Sequence[int],
        [[1], (1, 2), range(3), np.arange(3), torch.arange(3), collections.deque([1]), []],
    ),
    (Sequence[nn.Module], [nn.ModuleList([nn.Identity()]), nn.Sequential(nn.Identity())]),
    (Iterable[int], [iter([1]), (k for k in [1]), {1}, {1: 2}.values()]),
    (tuple[int, float], [(1, 0.5), [1, 2]]),
    (
        Mapping[str, int],
        [{"a": 1}, collections.OrderedDict(a=1), collections.ChainMap({"a": 1}), {}],
    ),
    (Callable[[int], int], [abs, int, nn.Identity()]),
    (nn.Module, [nn.Identity(), nn.ModuleList(), torch.compile(nn.Identity())]),
    (HasSize, [Sized(), torch.nn.Parameter()]),
    (
        Tensor,
        [
            torch.ones(2),
            nn.Parameter(torch.ones(2)),
            torch.ones(3, 2).t(),
            torch.zeros(0),
            torch.ones(1).expand(9),
        ],
    ),
    (Annotated[Tensor, Finite], [torch.ones(2), torch.zeros(0)]),
    (
        Float[Tensor, "*batch width"],
        [torch.ones(2), torch.ones(2, 3).double(), torch.ones(2).bfloat16()],
    ),
    (Count, [1, np.int32(7), torch.tensor(2), 10**9]),
    (Annotated[float, NOT_NEGATIVE], [0, 0.0, np.float32(2), torch.tensor(0.5)]),
]
WRONG = [
    (
        int,
        [
            True,
            2.0,
            "3",
            None,
            torch.tensor(2.0),
            torch.ones(1),
            np.arange(2),
            torch.tensor(True),
            torch.ones((), device="meta"),
        ],
    ),
    (
        float,
        [
            True,
            math.nan,
            math.inf,
            10**400,
            "1",
            1j,
            torch.tensor(math.nan),
            torch.tensor([0.5]),
            np.True_,
        ],
    ),
    (bool, ["yes", None, 2, 1.0]),
    (str, [b"x", None, 3, Path("x")]),
    (str | Path, ["a\0b", Path("a\0b"), 3, b"x"]),
    (Literal["pre", "post"], ["peri", 3, None, ["pre"]]),
    (Sequence[int], ["12", [1] * 99 + ["x"], {1}, iter([1]), {1: 2}, 3, torch.tensor(3), [True]]),
    (
        tuple[int, float],
        [torch.tensor(1.0), np.array(1.0), torch.ones(2).to_sparse(), (1,), (1, 2, 3), ("x", 1)],
    ),
    (Mapping[str, int], [{1: 2}, {"a": "b"}, [("a", 1)]]),
    (Callable[[int], int], [3, "abs", None]),
    (nn.Module, [abs, nn.Identity, None]),
    (HasSize, [object(), None]),
    (
        Tensor,
        [
            np.ones(2),
            [1.0],
            torch.ones(2).to_sparse(),
            torch.ones(2, device="meta"),
            torch.nested.nested_tensor([torch.ones(2)]),
        ],
    ),
    (Annotated[Tensor, Finite], [torch.tensor([1.0, math.inf]), torch.tensor(math.nan)]),
    (
        Float[Tensor, "*batch width"],
        [torch.ones(2, dtype=torch.int64), torch.tensor(1.0), torch.ones(2).to_sparse()],
    ),
    (Count, [0, -1, 10**9 + 1, 10**5000, True, 1.5, torch.tensor(0), np.int64(-3)]),
    (Annotated[float, NOT_NEGATIVE], [-1, math.inf, math.nan, torch.tensor(-1.0)]),
]


def of(hint):
    def function(value):
        return value

    function.__annotations__ = {"value": hint}
    return checked(function)


@pytest.mark.parametrize(("hint", "values"), RIGHT, ids=[str(hint) for hint, _ in RIGHT])
def test_what_has_the_annotated_type_passes_unchanged(hint, values):
    for value in values:
        assert of(hint)(value) is value
        assert of(hint | None)(value) is value
    assert of(hint | None)(None) is None


@pytest.mark.parametrize(("hint", "values"), WRONG, ids=[str(hint) for hint, _ in WRONG])
def test_what_has_another_type_is_named_with_what_is_allowed(hint, values):
    for value in values:
        with pytest.raises(
            ConfigError, match=r"^value .*: give |^unknown value .*: .*choose one of "
        ) as raised:
            of(hint)(value)
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize("hint", [hint for hint, _ in WRONG if hint is not HasSize], ids=str)
def test_a_nested_tensor_is_named_for_every_type(hint):
    with pytest.raises(
        ConfigError, match=r"^value = a tensor of shape \? .* that is not dense: give "
    ):
        of(hint)(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_an_iterator_is_left_as_it_is():
    assert list(of(Iterable[int])(iter([1, 2]))) == [1, 2]


def test_whether_sizes_agree_is_for_the_function_to_say():
    """In one annotation a name means one size, between arguments it does not."""

    @checked
    def product(a: Float[Tensor, "rows inner"], b: Float[Tensor, "inner columns"]) -> str:
        return "looked at"

    @checked
    def trace(a: Float[Tensor, "rows rows"]) -> None: ...

    assert product(torch.ones(2, 3), torch.ones(4, 5)) == "looked at"
    with pytest.raises(ConfigError, match=r"give a dense tensor of shape \(inner columns\)"):
        product(torch.ones(2, 3), torch.ones(4))
    with pytest.raises(ConfigError, match=r"give a dense tensor of shape \(rows rows\)"):
        trace(torch.ones(2, 3))


@checked
def tidied(text: str, names: Sequence[str]) -> str:
    return look_up("text", text, dict.fromkeys(names, text))


def test_an_argument_that_a_function_checks_itself_meets_its_message():
    by_itself = checked(tidied.__wrapped__, by_itself=["text"])
    with pytest.raises(ConfigError, match="text = 3: give text"):
        tidied(3, ["a"])
    with pytest.raises(ConfigError, match="unknown text 3: choose one of a"):
        by_itself(3, ["a"])
    with pytest.raises(ConfigError, match="names = 3: give a list"):
        by_itself("a", 3)


FACES = [ctrans, solvers, ctrans.control, ctrans.interop, monitor]


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_functions_of_a_face_are_checked_there_and_nowhere_inside(face):
    """They keep name, signature and docstring, and are pickled."""
    for name in face.__all__:
        function = getattr(face, name)
        if inspect.isfunction(function) and function.__module__ == face.__name__:
            inner = inspect.unwrap(function)
            assert getattr(sys.modules[inner.__module__], name) is not function
            assert inspect.signature(function) == inspect.signature(inner)
            assert (function.__name__, function.__doc__) == (inner.__name__, inner.__doc__)
            assert pickle.loads(pickle.dumps(function)) is function


def test_arguments_are_named_however_they_are_given():
    @checked
    def function(a: int, /, b: int = 1, *rest: int, c: int = 2, **more: int) -> None: ...

    function(1, 2, "not", "checked", c=3, d="nor is this")
    for call in (
        lambda: function("x"),
        lambda: function(1, "x"),
        lambda: function(1, c="x"),
        lambda: function(1, b="x"),
    ):
        with pytest.raises(ConfigError, match=r"^[abc] = 'x': give a whole number$"):
            call()
    with pytest.raises(TypeError, match="missing"):
        function()
    with pytest.raises(TypeError, match="multiple values"):
        solve("x", segments=[], x0=None)


def test_what_a_function_raises_by_itself_comes_through():
    @checked
    def function(a: int) -> None:
        raise KeyError(a)

    with pytest.raises(KeyError):
        function(1)


def test_a_function_keeps_its_name_signature_and_docstring():
    assert solve.__name__ == "solve"
    assert "step_control" in inspect.signature(solve).parameters
    assert solve.__doc__.startswith("x1 = x0")


def test_a_solve_checks_its_arguments_once(monkeypatch):
    """Not its steps and segments: the number of checks is that of the arguments."""
    counted = collections.Counter()

    def counting(made):
        counted[made.__qualname__] += 1
        return _checks(made)

    segments = [Segment(k, k + 1, lambda t, x: -x) for k in range(50)]
    monkeypatch.setattr(sys.modules["solvers.checked"], "_checks", counting)
    solve(segments, torch.ones(2), method="rk4", steps=20)
    assert counted == {"solve": 1}


def test_a_solve_is_mapped_and_differentiated_as_without_checks():
    def end(x, length=1.0):
        return solve([Segment(0, length, lambda t, x: -x)], x, method="rk4").x1.sum()

    x = torch.randn(4, 3)
    expected = (x * 0.375).sum(1)  # 1 - h + h^2/2 - h^3/6 + h^4/24 at h = 1
    torch.testing.assert_close(vmap(end)(x), expected)
    torch.testing.assert_close(grad(end)(x), torch.full((4, 3), 0.375))


def test_limits_that_may_be_infinite_or_plain_numbers():
    assert PI(grow=math.inf).grow == Cautious(grow=math.inf).grow == math.inf
    curve = odeint_dense(lambda t, y: -y, torch.ones(1), 0.0, torch.tensor(1.0))
    assert float(curve(torch.tensor(1.0))) == pytest.approx(math.exp(-1), rel=1e-6)


@pytest.mark.parametrize("steps", [10**13, 10**40, 10**5000], ids=["13", "40", "5000 digits"])
def test_more_steps_than_any_machine_takes_are_refused(steps):
    with pytest.raises(ConfigError, match=r"steps = .*: give at most"):
        solve([Segment(0, 1, lambda t, x: -x)], torch.ones(2), steps=steps)


HUGE = 10**5000  # Python prints no more than 4,300 digits


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Segment(HUGE, 1, lambda t, x: -x), "t0 = a number of 5001 digits"),
        (
            lambda: Segment(0, torch.nested.nested_tensor([torch.ones(2)]), lambda t, x: -x),
            r"t1 = a tensor of shape \?",
        ),
        (lambda: tableau(1, [[]], [1], gamma=HUGE), "the coefficient a number of 5001 digits"),
        (lambda: tableau(1, [[]], ["one"]), "the coefficient 'one'"),
        (lambda: tableau(1, [[]], ["1/0"]), "the coefficient '1/0'"),
        (lambda: ctrans.resume("n" * 300), "at most 255 bytes"),
        (lambda: ctrans.resume(Path("a", "n" * 300, "b")), "at most 255 bytes"),
        (lambda: ctrans.resume("/".join(["name"] * 1000)), "at most 255 bytes"),
    ],
    ids=[
        "time",
        "nested time",
        "gamma",
        "word",
        "quotient",
        "name",
        "name in a path",
        "path",
    ],
)
def test_what_neither_python_nor_the_system_can_hold_is_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_parameters_of_an_adjoint_come_in_any_order_of_things_but_not_as_one_tensor():
    rate = torch.tensor(2.0, requires_grad=True)
    t, y0 = torch.linspace(0, 1, 2), torch.ones(1)
    for params in ((rate,), iter([rate]), {"rate": rate}.values(), ()):
        (end,) = odeint_adjoint(lambda t, y: -rate * y, y0, t, adjoint_params=params)[1]
        (found,) = torch.autograd.grad(end, rate)
        assert float(found) == pytest.approx(-math.exp(-2), rel=1e-5)
    for method in (None, "dopri8"):  # rows of a tensor have no gradient of the whole
        with pytest.raises(ConfigError, match=r"adjoint_params = a tensor of shape \(3, 8\)"):
            odeint_adjoint(lambda t, y: -y, y0, t, method=method, adjoint_params=torch.ones(3, 8))


def test_an_event_is_solved_by_whatever_takes_the_arguments_of_odeint():
    func, event, y0, t0 = lambda t, y: -y, lambda t, y: y - 0.5, torch.ones(1), torch.tensor(0.0)
    for interface in (
        odeint,
        functools.partial(odeint, rtol=1e-9),
        lambda *given, **named: odeint(*given, **named),
    ):
        time, _ = odeint_event(func, y0, t0, event_fn=event, odeint_interface=interface)
        assert float(time) == pytest.approx(math.log(2), rel=1e-5)
    for interface in (print, torch.nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match="does not take the arguments of odeint"):
            odeint_event(func, y0, t0, event_fn=event, odeint_interface=interface)


def test_a_nested_tensor_has_no_entries_to_go_through():
    """It raises where its shape is asked for."""

    @checked
    def count(values: Iterable[object]) -> int:
        return sum(1 for _ in values)

    with pytest.raises(ConfigError, match="values = a tensor of shape"):
        count(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_a_nested_tensor_is_no_list_of_data():
    @checked
    def count(segments: Sequence[Segment]) -> int:
        return len(segments)

    with pytest.raises(ConfigError, match="segments = a tensor"):
        count(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_a_module_with_another_forward_is_no_field_of_odeint():
    with pytest.raises(ConfigError, match=r"forward\(t, y\)"):
        odeint(nn.Identity(), torch.ones(2), torch.tensor([0.0, 1.0]))
