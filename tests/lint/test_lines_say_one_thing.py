"""Writing that packs several statements into one line is refused.

The four forms are those that no formatter undoes and that a reader has to undo in the head.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "solvers").rglob("*.py"), *(ROOT / "ctrans").rglob("*.py")])
MOST_ASSIGNED_AT_ONCE = 2


def is_text(node):
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def assigns_many_at_once(node):
    """`a, b, c = 1, 2, 3`: three assignments that share nothing."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) > MOST_ASSIGNED_AT_ONCE
    )


def nests_conditionals(node):
    """`a if p else b if q else c`."""
    return isinstance(node, ast.IfExp) and any(
        isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node
    )


def multiplies_text(node):
    """`"text" * condition`: a conditional that looks like arithmetic."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    for text, times in ((node.left, node.right), (node.right, node.left)):
        is_condition = isinstance(times, (ast.Compare, ast.BoolOp)) or (
            isinstance(times, ast.UnaryOp) and isinstance(times.op, ast.Not)
        )
        if is_text(text) and is_condition:
            return True
    return False


def calls_for_its_effect(node):
    """`condition and f()` as a statement: an `if` without the word."""
    return isinstance(node, ast.Expr) and isinstance(node.value, (ast.BoolOp, ast.IfExp))


REFUSED = [assigns_many_at_once, nests_conditionals, multiplies_text, calls_for_its_effect]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.__name__)
def test_a_line_says_one_thing(refused):
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if refused(node)
    ]
    assert found == [], refused.__doc__


@pytest.mark.parametrize(
    ("refused", "line"),
    [
        (assigns_many_at_once, "a, b, c = 1, 2, 3"),
        (nests_conditionals, "a = 1 if p else 2 if q else 3"),
        (multiplies_text, "a = 's' * (count != 1)"),
        (multiplies_text, "a = f'{b}' * (not c)"),
        (calls_for_its_effect, "p and f()"),
    ],
)
def test_the_forms_are_recognised(refused, line):
    assert any(refused(node) for node in ast.walk(ast.parse(line)))


@pytest.mark.parametrize(
    ("refused", "line"),
    [
        (assigns_many_at_once, "a, b = b, a"),
        (nests_conditionals, "a = 1 if p else 2"),
        (multiplies_text, "a = ' ' * width"),
        (calls_for_its_effect, "a = p and f()"),
    ],
)
def test_other_lines_are_not(refused, line):
    assert not any(refused(node) for node in ast.walk(ast.parse(line)))
