"""The list of tests that `make test` allows more time."""

import ast
from pathlib import Path

from tests.end_to_end import END_TO_END

ROOT = Path(__file__).parents[2]


def test_at_most_forty_tests_may_take_long():
    assert len(set(END_TO_END)) == len(END_TO_END) <= 40


def test_each_of_them_exists():
    for name in END_TO_END:
        path, _, rest = name.partition("::")
        functions = {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        assert rest.partition("[")[0] in functions, name
