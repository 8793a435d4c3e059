"""The rooms of the house: each may import the ones before it, never a later one."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import typing_extensions

import ctrans
import solvers
from ctrans.base.protocol import AsksTheInstance

ROOT = Path(__file__).parents[2]
SOLVERS_MAY_IMPORT = {"torch", "torchdiffeq", "jaxtyping", "solvers"}
# Rooms on one row may import each other only if listed before.
ROOMS = [
    "base",
    "dynamics",
    "model",
    "measure",
    "control",
    "interop",
    "examine",
    "training",
    "study",
    "theory",
    "report",
    "cli",
]
FILES = sorted([*(ROOT / "solvers").rglob("*.py"), *(ROOT / "ctrans").rglob("*.py")])


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module):
    parts = module.split(".")
    return parts[1] if parts[0] == "ctrans" and len(parts) > 1 and parts[1] in ROOMS else None


IN_MEASURE = ["walk", "forward", "backward", "attention", "transport", "initialisation"]


def test_the_topics_of_measures_import_earlier_ones_only():
    where = ROOT / "ctrans" / "measure"
    assert {path.name for path in where.iterdir() if (path / "__init__.py").exists()} == set(
        IN_MEASURE
    )
    for path in where.rglob("*/*.py"):
        for imported in imports(path):
            parts = imported.split(".")
            if parts[:2] == ["ctrans", "measure"] and parts[2] in IN_MEASURE:
                assert IN_MEASURE.index(parts[2]) <= IN_MEASURE.index(path.parent.name), (
                    f"{path}: {imported}"
                )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_lead_to_earlier_rooms(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for imported in imports(path):
        package = imported.split(".")[0]
        if module.startswith("solvers"):
            standard = package in __import__("sys").stdlib_module_names
            assert standard or package in SOLVERS_MAY_IMPORT, f"{module} imports {imported}"
        mine, theirs = room(module), room(imported)
        if mine and theirs:
            assert ROOMS.index(theirs) <= ROOMS.index(mine), (
                f"{module} imports {imported}, a later room"
            )


def test_only_the_command_verify_imports_theory():
    importing = {
        str(path.relative_to(ROOT))
        for path in FILES
        if not path.is_relative_to(ROOT / "ctrans" / "theory")
        and any(room(imported) == "theory" for imported in imports(path))
    }
    assert importing == {"ctrans/cli/verify.py"}


def test_the_rooms_are_drawn_in_their_order():
    (drawing,) = re.findall(
        r"^ctrans/\n((?:  .*\n)+)", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    assert [line.split()[0].rstrip("/") for line in drawing.splitlines()] == ROOMS


def test_every_module_of_ctrans_is_in_a_room():
    for path in sorted((ROOT / "ctrans").iterdir()):
        name = path.stem if path.suffix == ".py" else path.name
        assert name in {
            *ROOMS,
            "__init__",
            "__main__",
            "__pycache__",
            "py.typed",
        }, f"{name} is in no room"


def test_solvers_offers_by_name_all_that_ctrans_takes_from_it():
    taken = {
        name
        for path in FILES
        if path.is_relative_to(ROOT / "ctrans")
        for name in imports(path)
        if name.split(".")[0] == "solvers"
    }
    assert "solvers" not in taken, "import solvers hides what is taken of it: import the names"
    assert {name for name in taken if name.rpartition(".")[2] not in solvers.__all__} == set()


TABLES = {"diagnostic_checks.py", "training_measures.py"}
"""Files that are one table, which grows with its entries."""


def test_files_are_one_idea_long():
    long = {
        str(path): n
        for path in FILES
        if (n := path.read_text().count("\n")) > 500 and path.name not in TABLES
    }
    assert long == {}, "a file of over 500 lines is two ideas: split it"


def test_class_names_are_unique_in_the_packages():
    homes = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def aliases(tree):
    """Names that stand for a type at the top of a module, each with the type: Name = Callable[...],
    A | B, Literal[...].
    """
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, kinds = node.targets[0].id, (ast.Subscript, ast.BinOp, ast.Name, ast.Attribute)
            if isinstance(node.value, kinds) and name[0].isupper() and not name.isupper():
                yield name, ast.unparse(node.value)


@pytest.mark.parametrize("package", ["solvers", "ctrans"])
def test_a_name_means_one_type_in_a_package(package):
    """One class, or one alias, which several modules may say in the same words."""
    meanings = {}
    for path in (path for path in FILES if path.is_relative_to(ROOT / package)):
        tree = ast.parse(path.read_text())
        classes = [
            (node.name, f"class of {path.relative_to(ROOT)}")
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        ]
        for name, meaning in [*classes, *aliases(tree)]:
            meanings.setdefault(name, set()).add(meaning)
    several = {name: sorted(each) for name, each in meanings.items() if len(each) > 1}
    assert several == {}, several


OF_MAPS = (Path("ctrans/dynamics/fields"), Path("ctrans/interop"))


def is_of_maps(path):
    return any(path.relative_to(ROOT).is_relative_to(room) for room in OF_MAPS)


def concrete_maps():
    """The modules of fields and interop that are maps or parts of one: by their bases, less models,
    which have a trajectory.
    """
    classes = {
        node.name: node
        for path in FILES
        if is_of_maps(path)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    bases = {
        name: {ast.unparse(base).split(".")[-1] for base in node.bases}
        for name, node in classes.items()
    }

    def with_subclasses(names):
        while more := {name for name, given in bases.items() if given & names} - names:
            names = names | more
        return names

    models = {
        name
        for name, node in classes.items()
        if any(getattr(part, "name", "") == "trajectory" for part in node.body)
    }
    return with_subclasses({"Module"}) - with_subclasses(models) - {"Module"}


def asked_for(node):
    """The expressions for types that a question is about: isinstance and issubclass, a comparison
    of types, a pattern of a class.
    """
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
        return [node.args[1]]
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    return [node.cls] if isinstance(node, ast.MatchClass) else []


def names_asked_for(tree):
    parts = (
        part for node in ast.walk(tree) for asked in asked_for(node) for part in ast.walk(asked)
    )
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in parts
        if isinstance(part, (ast.Name, ast.Attribute))
    }


def test_no_room_but_fields_and_interop_asks_for_a_concrete_map():
    concrete = concrete_maps()
    assert {
        "Attention",
        "FeedForward",
        "MixtureOfExperts",
        "ModuleChain",
        "AttentionInModel",
    } <= concrete
    assert not {"Opened", "HasOutputProjection", "HasBound"} & concrete, (
        "models and protocols may be asked for"
    )
    for path in FILES:
        if not is_of_maps(path):
            asked = names_asked_for(ast.parse(path.read_text())) & concrete
            assert not asked, f"{path}: asks for {asked}"


@pytest.mark.parametrize(
    "question",
    [
        "isinstance(f, Attention)",
        "isinstance(f, (nn.Linear, fields.Attention))",
        "type(f) is Attention",
        "issubclass(type(f), fields.attention.Attention)",
        "match f:\n    case Attention(): pass",
    ],
)
def test_a_question_for_a_class_is_seen_however_it_is_put(question):
    assert "Attention" in names_asked_for(ast.parse(question))


def test_protocols_of_attributes_ask_the_instance():
    """From Python 3.12 on, isinstance does not see the parameters and modules of an nn.Module
    otherwise; CI has an older one.
    """
    found = {}
    for info in pkgutil.walk_packages(ctrans.__path__, "ctrans."):
        if info.name != "ctrans.__main__":
            for each in vars(importlib.import_module(info.name)).values():
                if getattr(each, "_is_runtime_protocol", False) and each.__module__ == info.name:
                    members = typing_extensions.get_protocol_members(each)
                    if not all(callable(getattr(each, name, None)) for name in members):
                        found[each.__name__] = type(each)
    assert {"Model", "SumOfMaps", "HasTemperature"} <= found.keys()
    plain = {name for name, kind in found.items() if kind is not AsksTheInstance}
    assert plain == {"TransposedLinear"}, "its members are plain numbers"
