"""Arguments are checked where a user calls, once. What is inside has types and no decorator."""

import ast
import inspect
from pathlib import Path

import ctrans
import solvers

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "solvers").rglob("*.py"), *(ROOT / "ctrans").rglob("*.py")])
FACES = {
    "ctrans/__init__.py",
    "ctrans/control/__init__.py",
    "ctrans/interop/__init__.py",
    "ctrans/training/monitor/__init__.py",
    "solvers/__init__.py",
}
"""The packages that offer functions to users, and check the arguments of those."""
CONTRACTS = {"TrainerCallback": "a user makes it, for `Trainer(..., callbacks=[...])`"}
"""Checked classes that neither `ctrans.__all__` nor `solvers.__all__` names, each with its reason."""
CHECK_THEMSELVES = {
    "AdjointError": "a report that a solve makes",
    "Checkpoint": "its own message says more",
    "Controller": "a protocol",
    "EachSolution": "a result",
    "Event": "its own messages say more",
    "GPTConfig": "its options have limits, which `ctrans.base.option` checks",
    "Gradient": "an abstract class",
    "HasFixedSteps": "a protocol",
    "HasReversibleForm": "a protocol",
    "Method": "a protocol",
    "Replayable": "a protocol",
    "ReversibleForm": "a protocol",
    "Run": "it belongs to one solve, which makes it",
    "Segment": "its own messages say more, and a solve makes many",
    "Solution": "a result",
    "Stats": "a result",
    "Status": "an enumeration",
    "StepControl": "its own messages say more",
    "TrainConfig": "its options have limits, which `ctrans.base.option` checks",
}
"""Classes that a user meets in `ctrans.__all__` or `solvers.__all__` and that are not decorated."""


def name_of(decorator):
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(function, "id", getattr(function, "attr", ""))


def decorated(tree):
    """The names of the classes and functions that `@checked` stands on."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, kinds) and "checked" in map(name_of, node.decorator_list)
    }


def calls_checked(tree):
    """Whether the module makes a checked function by a call, as `checked(solve, face=...)`."""
    decorators = {
        decorator for node in ast.walk(tree) for decorator in getattr(node, "decorator_list", ())
    }
    return any(
        isinstance(node, ast.Call) and name_of(node) == "checked" and node not in decorators
        for node in ast.walk(tree)
    )


def offered_classes():
    """The classes that users meet by name, but errors."""
    return {
        name
        for face in (ctrans, solvers)
        for name in face.__all__
        if inspect.isclass(offered := getattr(face, name)) and not issubclass(offered, Exception)
    }


def decorated_everywhere():
    return set().union(*(decorated(ast.parse(path.read_text())) for path in FILES))


def test_only_what_a_user_calls_is_decorated():
    everywhere = decorated_everywhere()
    inside = everywhere - {*offered_classes(), *CONTRACTS}
    assert inside == set(), (
        "take @checked away, and say in the constructor what a user can get wrong"
    )
    assert CONTRACTS.keys() <= everywhere, "no such class is decorated any more"


def test_every_class_that_a_user_makes_is_checked():
    unchecked = offered_classes() - decorated_everywhere()
    assert unchecked == CHECK_THEMSELVES.keys()


def test_functions_are_checked_in_the_packages_that_offer_them():
    calling = {
        str(path.relative_to(ROOT)) for path in FILES if calls_checked(ast.parse(path.read_text()))
    }
    assert calling == FACES


def test_a_decorator_is_seen_with_and_without_arguments():
    source = (
        "@checked\nclass A: ...\n@solvers.checked(face='x')\ndef b(): ...\n@other\nclass C: ..."
    )
    assert decorated(ast.parse(source)) == {"A", "b"}
    assert not calls_checked(ast.parse(source))
    assert calls_checked(ast.parse("solve = checked(solve, face=__name__)"))
