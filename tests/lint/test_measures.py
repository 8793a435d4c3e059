"""Every measure of the table is made somewhere: by the function of its entry, or by code that names
it.
"""

import ast
import importlib
import re
from pathlib import Path

import ctrans
from ctrans.measure.measures import MEASURES, Measure

PACKAGE = Path(ctrans.__file__).parent
SHOW = ("report", "cli")
"""Rooms that show figures and make none."""
STEPS_MEASURES = PACKAGE / "examine" / "screening" / "screening_checks.py"
"""It says again which measures each step has."""
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "MEASURES.add(" in path.read_text())
HOLE = "{}"


def texts_in(node):
    """The texts in a piece of code, with a hole for each value in them."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(
            part.value if isinstance(part, ast.Constant) else HOLE for part in node.values
        )
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts_in(child)


def names_in(tree):
    """The names of variables, attributes and arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def registrations(tree):
    """The calls that put entries into the table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            table = node.func.value
            of_table = isinstance(table, ast.Name) and table.id == "MEASURES"
            if of_table and node.func.attr in ("add", "limit"):
                yield node


def named_in(code):
    """The texts and names of a file outside of its entries, and the texts with a hole by who
    measures their entries. A text with a hole must be the same in both places: `f"{part} of
    {product}"` would name too much.
    """
    tree = ast.parse(code)
    entries = {}
    for call in registrations(tree):
        measured_by, *rest = texts_in(ast.Tuple(elts=call.args))
        entries |= dict.fromkeys(rest, measured_by)
        call.args = []
    texts = {*texts_in(tree), *names_in(tree)}
    templates = {(entries[text], text) for text in texts if HOLE in text and text in entries}
    return texts, templates


def named():
    """The same of all files that make figures."""
    texts = set()
    templates = set()
    for path in PACKAGE.rglob("*.py"):
        shows = path.relative_to(PACKAGE).parts[0] in SHOW
        if not shows and path != STEPS_MEASURES:
            of_file = named_in(path.read_text())
            texts |= of_file[0]
            templates |= of_file[1]
    return texts, templates


def made_by_nothing(measures, texts, templates):
    """The measures without a function that no code names. A measure that is only there for its
    findings is named by its check, and one that a driver's object has by its key there.
    """
    for name, measure in measures.items():
        is_named = not texts.isdisjoint({name, measure.key, *measure.checks} - {""})
        fits = [
            measured_by == measure.measured_by
            and re.fullmatch(".+".join(map(re.escape, template.split(HOLE))), name)
            for measured_by, template in templates
        ]
        if measure.compute is None and not is_named and not any(fits):
            yield name


def test_code_makes_each_measure_of_the_table():
    for path in FILES:
        module = path.relative_to(PACKAGE.parent).with_suffix("")
        importlib.import_module(".".join(module.parts))
    of_package = named()
    assert [*made_by_nothing(MEASURES, *of_package)] == []
    assert sum(measure.compute is None for measure in MEASURES.values()) > 150
    by_nobody = {"a figure of nobody": Measure(formula="it", measured_by="ctrans screen")}
    assert [*made_by_nothing(by_nobody, *of_package)] == ["a figure of nobody"]


def test_a_measure_with_a_key_is_made_by_code_that_has_the_key():
    texts, templates = named_in("class Run:\n    last_loss: float\n\nName = 'last loss'")
    right = Measure(formula="it", measured_by="me", key="last_loss")
    wrong = Measure(formula="it", measured_by="me", key="loss_at_the_end")
    measures = {"last loss": right, "a last loss": wrong}
    assert [*made_by_nothing(measures, texts, templates)] == ["a last loss"]


CODE = """
MEASURES.add("me", {"entry": Measure(formula="it"), f"length of {part}": Measure(formula="it")})
VALUES = [Value("model", "figure", 1.0), Value("model", f"length of {it}", 1.0), f"{it} of {part}"]
"""


def test_an_entry_is_no_figure_and_a_name_with_a_hole_is_one_of_those_who_have_its_entry():
    mine = Measure(formula="it", measured_by="me")
    names = ("entry", "figure", "length of a leg", "size of a leg")
    assert [*made_by_nothing(dict.fromkeys(names, mine), *named_in(CODE))] == [
        "entry",
        "size of a leg",
    ]
    yours = Measure(formula="it", measured_by="you")
    assert [*made_by_nothing({"length of a leg": yours}, *named_in(CODE))] == ["length of a leg"]
