"""Which tests are left to `make test-all`: no file and no cheap oracle is, no test that failed, and none that is not there."""

import ast
import functools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.costs import AGAIN, ONCE, TOLD, left_out, listed, merged, untold

pytestmark = pytest.mark.core
ROOT = Path(__file__).parents[1]
NAMES = [f"tests/test_{file}.py::test_{function}[{case}]" for file in "ab" for function in "xyz" for case in range(3)]


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, st.floats(AGAIN, 3))))
def test_every_file_keeps_a_test_and_every_cheap_oracle_a_case(costs):
    kept = set(NAMES) - left_out(NAMES, costs)
    assert {name.partition("::")[0] for name in kept} == {"tests/test_a.py", "tests/test_b.py"}
    functions = {name.partition("[")[0] for name in NAMES}
    cheapest = {function: min(costs.get(name, 0) for name in NAMES if name.startswith(function)) for function in functions}
    assert {function for function in functions if cheapest[function] < ONCE} <= {name.partition("[")[0] for name in kept}
    assert kept >= set(NAMES) - set(costs)


def test_the_cheapest_case_stays_and_the_other_dear_ones_go():
    costs = {NAMES[0]: 0.5, NAMES[1]: 0.4, NAMES[2]: 0.3, NAMES[3]: 0.9, NAMES[4]: 0.8, NAMES[5]: 1.0}
    assert left_out(NAMES[:6], costs) == {NAMES[0], NAMES[1], NAMES[3], NAMES[4], NAMES[5]}
    assert left_out(NAMES[3:6], costs) == {NAMES[3], NAMES[5]}, "a file of dear tests keeps its cheapest"


def test_what_is_measured_replaces_what_was_known_and_what_failed_is_never_listed():
    first, second, third, gone, other = *NAMES[:3], "tests/test_a.py::test_gone", NAMES[-1]
    known = {gone: 2.0, first: 1.0, other: 0.7}
    now = {first: AGAIN / 2, second: 0.6, third: 3.0}
    assert merged(known, now, {third}, whole_files=True) == {other: 0.7, second: 0.6}
    assert merged(known, now, {third}, whole_files=False) == {gone: 2.0, other: 0.7, second: 0.6}
    assert list(untold({first: TOLD, second: TOLD + 1, third: TOLD / 2, other: TOLD}, known)) == [second]


@functools.cache
def functions(file):
    """The tests of a file by name, those of its classes too."""
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_listed_test_is_there():
    assert [name for name in listed() if name.partition("[")[0].split("::")[-1] not in functions(name.partition("::")[0])] == []
