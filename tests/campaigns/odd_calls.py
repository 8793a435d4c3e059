"""Calls of every public function and class with odd values, generated from the signatures.

Public is what `__all__` of ctrans and solvers names, and the functions of the other packages of
`FACES`: there arguments are checked, and nowhere inside. A new one is called without an entry here; `GOOD` has what its required arguments may be, by
their names.
"""

import contextlib
import dataclasses
import enum
import importlib
import inspect
import io
import itertools
import math
import time
import traceback
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

import ctrans
import solvers
from ctrans import GPT, Attention, FeedForward, RMSNorm, Sublayer, TrainConfig
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.walk import Lane, States
from ctrans.report.sections import Page
from tests.campaigns.harness import BYTES, IMPORTS, SECONDS, memory, reset_memory
from tests.helpers import small_config, tokens

ROOT = Path(__file__).parent.parent.parent
FACES = ("ctrans", "solvers", "ctrans.control", "ctrans.interop", "ctrans.training.monitor")


class Mine(Exception):  # noqa: N818
    """What a user's own function raises: it has to come through unchanged."""


def raises(*arguments, **named):
    raise Mine("mine")


class Raises(nn.Module):
    """A user's module that raises."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *arguments):
        raise Mine("mine")


def public():
    """Each public function and class that can be called, by its name."""
    named = {}
    for face in FACES:
        module = importlib.import_module(face)
        offered = {f"{face}.{name}": getattr(module, name) for name in module.__all__}
        if face not in ("ctrans", "solvers"):
            offered = {name: each for name, each in offered.items() if inspect.isfunction(each)}
        named |= offered
    once = {
        id(found): name
        for name, found in reversed(named.items())
        if callable(found) and not abstract(found)
    }
    return {name: named[name] for name in sorted(once.values())}


def abstract(found):
    """Whether it is no call to check: a type alias, a protocol, an abstract class, an enumeration,
    an error or what makes one.
    """
    if not isinstance(found, type):
        return not inspect.isroutine(found) or found in (
            solvers.look_up,
            solvers.unknown,
            solvers.checked,
        )
    return (
        inspect.isabstract(found)
        or getattr(found, "_is_protocol", False)
        or issubclass(found, (BaseException, enum.Enum))
    )


NUMBER = itertools.count()
P = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
GOOD = {
    "config": lambda: small_config("peri", depth=1, width=8),
    "model": lambda: GPT(small_config("peri", depth=1, width=8)),
    "depth": lambda: GPT(small_config("peri", depth=1, width=8)).depth,
    "costate": lambda: ctrans.costate(
        GPT(small_config("peri", depth=1, width=8)), tokens(), tokens()
    ),
    "admissible": lambda: "peri",
    "P": lambda: P,
    "norm": lambda: RMSNorm(8),
    "placement": lambda: "peri",
    "tokens": tokens,
    "targets": tokens,
    "prompt": tokens,
    "count": lambda: 2,
    "width": lambda: 8,
    "heads": lambda: 2,
    "hidden": lambda: 16,
    "attention": lambda: Attention(8, 2),
    "ffn": lambda: FeedForward(8, 16),
    "field": lambda: FeedForward(8, 16),
    "kind": lambda: "ffn",
    "sublayers": lambda: [Sublayer(FeedForward(8, 16), "ffn") for _ in range(2)],
    "dt": lambda: 0.5,
    "out": lambda: f"run{next(NUMBER)}",
    "directory": lambda: f"model{next(NUMBER)}",
    "source": lambda: "nowhere",
    "architecture": lambda: {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 2,
        "vocab_size": 9,
    },
    "segments": lambda: [solvers.Segment(0, 1, lambda t, x: -x)],
    "x0": lambda: torch.ones(2, 3),
    "x": lambda: torch.ones(2, 3),
    "y0": lambda: torch.ones(2, 3),
    "func": lambda: lambda t, x: -x,
    "function": lambda: lambda t, x: x.sum(),
    "event_fn": lambda: lambda t, x: x.sum() - 1,
    "t": lambda: torch.linspace(0, 1, 3),
    "t0": lambda: torch.tensor(0.0),
    "t1": lambda: torch.tensor(1.0),
    "method": lambda: "rk4",
    "steps": lambda: 2,
    "rtol": lambda: None,
    "atol": lambda: None,
    "dtype": lambda: torch.float32,
    "gradient": lambda: "backprop",
    "tableau": lambda: solvers.EULER,
    "order": lambda: 1,
    "a": lambda: [[]],
    "b": lambda: [1],
    "c": lambda: (0.0,),
    "text": lambda: b"so long " * 99,
    "context": lambda: 8,
    "train": lambda: np.arange(99) % 7,
    "validation": lambda: np.arange(99) % 7,
    "name": lambda: "the data",
    "batch": lambda: 4,
    "world": lambda: 2,
    "kernel": lambda: torch.eye(3),
    "what": lambda: "name",
    "value": lambda: 1.0,
    "allowed": lambda: ["a", "b"],
    "table": lambda: {"a": 1},
    "given": dict,
    "results": lambda: {"command": "x"},
    "page": lambda: Page("title", "asked", [], {}),
    "loss": lambda: None,
    "state": lambda: torch.ones(3, 8),
    "states": lambda: [torch.ones(2, 3, 8)] * 3,
    "features": lambda: torch.ones(3, 8),
    "gamma": lambda: torch.ones(8),
    "beta": lambda: torch.zeros(8),
    "weight": lambda: torch.ones(3, 8),
    "left": lambda: torch.ones(8, 3),
    "right": lambda: torch.ones(3, 8),
    "matrix": lambda: torch.ones(3, 8),
    "logits": lambda: torch.ones(2, 3, 3),
    "iterations": lambda: 2,
    "eps": lambda: 1e-5,
    "radius": lambda: 1.0,
    "start": lambda: None,
    "streams": lambda: None,
    "instruments": lambda: [States()],
    "lanes": lambda: [Lane(tokens(), None, [States()])],
    "module": lambda: Attention(8, 2),
    "path": lambda: "nowhere",
    "placements": lambda: [PLACEMENTS["peri"]],
}
"""Arguments that make sense, by their names. `OWN` has those of a single function."""
WALKS = ("cross_entropy", "terminal_loss", "value_and_pullback", "walk_depth")


def states():
    return torch.ones(2, 8, 8)


OWN = {
    **{
        f"ctrans.measure.walk.{name}": {
            "x": states,
            "x0": states,
            "function": lambda: lambda x: x.sum(),
        }
        for name in WALKS
    },
    "ctrans.train": {
        "config": lambda: TrainConfig(
            iterations=1, batch=2, eval_every=1, eval_windows=1, save_every=1, warmup=0
        )
    },
}
NUMBERS = [
    0,
    -1,
    1,
    2,
    1.5,
    10**40,
    10**5000,
    -(10**400),
    math.nan,
    math.inf,
    -math.inf,
    1e39,
    1e-320,
    True,
    Fraction(1, 3),
    1j,
]
TEXTS = [
    "",
    "x",
    "n" * 300,
    "\udcff",
    "\0",
    "\x1b[2J",
    "peri",
    "rms",
    "euler",
    b"bytes",
    Path("nowhere"),
    Path("/dev/null"),
]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float64,
    torch.complex64,
]
TENSORS = [
    torch.tensor(3.0),
    torch.tensor(math.nan),
    torch.zeros(0),
    torch.zeros(2, 0),
    torch.zeros(2, 8, 0),
    torch.zeros(2, 99, dtype=torch.int64),
    torch.full((2, 8), -1),
    torch.full((2, 8), 10**9),
    torch.full((2, 3), math.nan),
    torch.full((3, 8), math.inf),
    torch.full((3, 8), 1e39, dtype=torch.float64),
    torch.zeros(2, 8, dtype=torch.int64).to_sparse(),
    torch.ones(3, 8).to_sparse(),
    torch.ones(3, 8).to_sparse_csr(),
    torch.ones(3, 8, device="meta"),
    torch.zeros(2, 8, dtype=torch.int64, device="meta"),
    torch.ones(8, 3).t(),
    torch.ones(3, 8, requires_grad=True),
    torch.ones(1).expand(3, 8),
    torch.quantize_per_tensor(torch.ones(3, 8), 0.1, 0, torch.qint8),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    *(torch.ones(3, 8).to(dtype) for dtype in DTYPES),
]
MODULES = [
    nn.Linear(2, 2),
    nn.Linear(8, 8),
    nn.Identity(),
    nn.Module(),
    Raises(),
    nn.ModuleList(),
    RMSNorm(3),
    RMSNorm(8).double(),
]
CALLABLES = [
    raises,
    lambda *given, **named: None,
    lambda *given, **named: "x",
    lambda *given, **named: torch.ones(7),
    lambda *given, **named: math.nan,
    lambda *given, **named: given,
    print,
]
COLLECTIONS = [
    {},
    {"a": 1},
    {1: 2},
    [],
    [1],
    ["pre"],
    [math.nan],
    [[1] * 8] * 2,
    (),
    (1, 2),
    {1},
    iter([1]),
    np.ones(3),
    np.full(30, math.nan),
]
ARRAYS = [
    np.ones(3),
    np.full(30, math.nan),
    np.zeros(0),
    np.full((30, 2), 1),
    np.full(30, -1),
    np.array(["a"]),
    np.full(30, 2**40),
]
OTHERS = [None, object(), Ellipsis, torch.float16, torch.device("meta"), NotImplemented]
ODD = [*NUMBERS, *TEXTS, *TENSORS, *MODULES, *CALLABLES, *COLLECTIONS, *ARRAYS, *OTHERS]
KINDS = {
    "int": NUMBERS,
    "float": NUMBERS,
    "Time": NUMBERS,
    "Coefficient": NUMBERS,
    "str": TEXTS,
    "Path": TEXTS,
    "Tensor": TENSORS,
    "Rows": TENSORS,
    "Module": MODULES,
    "Callable": CALLABLES,
    "Field": CALLABLES,
    "Sequence": COLLECTIONS,
    "Mapping": COLLECTIONS,
    "Iterable": COLLECTIONS,
    "ndarray": [*ARRAYS, *COLLECTIONS],
    "Tokens": [*ARRAYS, *COLLECTIONS],
    "bool": [0, 1, None, "yes", torch.tensor(True), np.True_],
}


def pool(parameter):
    """Odd values for a parameter: those near to its annotation, and at times any other."""
    near = [
        value
        for word, values in KINDS.items()
        if word in str(parameter.annotation)
        for value in values
    ]
    return st.one_of(st.sampled_from(near or ODD), st.sampled_from(ODD))


CALLED = public()
MANY = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
PARAMETERS = {
    name: {
        each.name: each
        for each in inspect.signature(found).parameters.values()
        if each.kind not in MANY
    }
    for name, found in CALLED.items()
}


@st.composite
def calls(draw):
    """A public name with arguments: good ones where the call needs them, and one to three odd
    ones.
    """
    name = draw(st.sampled_from([name for name in CALLED if PARAMETERS[name]]))
    parameters = PARAMETERS[name]
    good = {**GOOD, **OWN.get(name, {})}
    needed = [
        each.name
        for each in parameters.values()
        if each.default is inspect.Parameter.empty or each.name in OWN.get(name, {})
    ]
    odd = draw(
        st.lists(
            st.sampled_from(sorted(parameters)),
            min_size=1,
            max_size=min(3, len(parameters)),
            unique=True,
        )
    )
    chosen = {argument: draw(pool(parameters[argument])) for argument in odd}
    return (
        name,
        {
            **{
                each: good[each]() if each in good else draw(pool(parameters[each]))
                for each in needed
            },
            **chosen,
        },
        odd,
    )


def has_nan(value, depth=3):
    """Whether there is a nan in the numbers of a value."""
    if isinstance(value, torch.Tensor):
        numbers = value.layout is torch.strided and not (
            value.is_meta or value.is_nested or value.is_quantized
        )
        return numbers and value.is_floating_point() and bool(value.isnan().any())
    if isinstance(value, float):
        return math.isnan(value)
    if depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(
            has_nan(getattr(value, field.name, None), depth - 1)
            for field in dataclasses.fields(value)
        )
    if depth and isinstance(value, (list, tuple)):
        return any(has_nan(each, depth - 1) for each in value)
    return (
        depth > 0
        and isinstance(value, Mapping)
        and any(has_nan(each, depth - 1) for each in value.values())
    )


MAY_BE_NAN = ("ctrans.measure.walk.states_of", "ctrans.measure.walk.walk_depth")
"""What walks from an infinite X_0 and says so: states may be non-finite."""


def fault_of(name, arguments, answer):
    """What is wrong with an answer; None if nothing is."""
    if isinstance(answer, solvers.Solution) and name == "solvers.solve":
        x0 = arguments["x0"]
        if isinstance(x0, torch.Tensor) and answer.x1.shape != x0.shape:
            return f"x1 of shape {tuple(answer.x1.shape)}"
    if (
        not isinstance(CALLED[name], type)
        and not (name in MAY_BE_NAN and not arguments["x0"].isfinite().all())
        and not callable(arguments.get("odeint_interface"))  # it makes the answer
        and has_nan(answer)
        and not any(map(has_nan, arguments.values()))
    ):
        return "nan in silence"
    return None


def raised_by(error, function):
    """Whether a module of torch, given as the function, raised it: a user's own function, whose
    error comes through unchanged.
    """
    own = (
        inspect.getfile(type(function))
        if type(function).__module__.startswith("torch.nn")
        else None
    )
    return own is not None and any(
        frame.filename == own for frame in traceback.extract_tb(error.__traceback__)
    )


def ended(name, arguments, odd, found):
    """Whether a call is "answered" or "refused"; `found` gets what is neither, in words."""
    given = dict(arguments)
    first = [
        given.pop(each.name)
        for each in PARAMETERS[name].values()
        if each.kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    try:
        answer = CALLED[name](*first, **given)
    except Mine:
        return "answered"
    except NotImplementedError as error:
        wrong = (
            None if "forward" in str(error) else str(error)[:200]
        )  # of a user's module without one
    except (solvers.ConfigError, solvers.SolveError):
        return "refused"
    except Exception as error:  # whatever is no refusal is what a campaign looks for
        wrong = (
            None
            if raised_by(error, arguments.get("function"))
            else f"{type(error).__name__}: {str(error)[:200]}"
        )
    else:
        wrong = fault_of(name, arguments, answer)
    if wrong is not None:
        found(f"{said(name, arguments, odd)}: {wrong}")
        return "fault"
    return "answered"


def said(name, arguments, odd):
    """A call in words."""
    return f"{name}({', '.join(f'{each}={solvers.shown(arguments[each])}' for each in odd)})"


def measured(name, arguments, odd):
    """How a call ended, its faults, its seconds and the most bytes that this process held."""
    faults = []
    before, started = reset_memory(), time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):  # a user's function may print
        end = ended(name, arguments, odd, faults.append)
    seconds, held = time.monotonic() - started, IMPORTS + memory("VmHWM") - before
    faults += [f"{said(name, arguments, odd)}: {seconds:.0f} seconds"] if seconds > SECONDS else []
    faults += [f"{said(name, arguments, odd)}: {held / 1e9:.1f} GB"] if held > BYTES else []
    return end, faults, seconds, held
