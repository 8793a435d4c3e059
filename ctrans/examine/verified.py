"""What `ctrans verify` measures of the statements of theory, as one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from ctrans.base.from_json import from_json
from ctrans.base.protocol import AsksTheInstance
from ctrans.base.theory_sections import SECTIONS
from ctrans.measure.findings import Finding
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure

VERDICTS = {
    "as printed": "the source's form holds",
    "corrected": "the source's form fails and another form holds",
    "sharpened": "the source's form holds, and so does a stronger form",
    "new": "no source states it",
    "violated": "a form that should hold does not",
}
"""What a statement's verdict means."""
FEW = 12
"""Up to so many statements stand one by one in the remarks; more are counted by section."""
REACHED = (
    "the worst case: measured/bound - 1 for a bound, so that -0.1 is 10% of slack; a relative"
    " difference for an equality; how far a slope, order or mean lies outside its range, negative"
    " inside"
)
_of_a_statement = partial(Measure, topic="Statements", subject="statement", detail=True)
_of_a_section = partial(Measure, topic="Statements by section", subject="section of THEORY.md")
MEASURES.add(
    "ctrans verify",
    {
        "section": _of_a_statement(formula="the section of THEORY.md", shown_by="words"),
        "holds": _of_a_statement(
            formula="; ".join(f"{verdict}: {meaning}" for verdict, meaning in VERDICTS.items()),
            title="verdict",
        ),
        "what holds": _of_a_statement(formula="the statement"),
        "worst case": _of_a_statement(formula=REACHED, title="reached"),
        "cases": _of_a_statement(formula="the number of random cases"),
        "source of a statement": _of_a_statement(formula="where it is stated", title="source"),
        "printed form": _of_a_statement(formula="as the source prints it"),
        "fate of the printed form": _of_a_statement(formula="whether it holds"),
        **{
            f"statements: {verdict}": _of_a_section(
                formula=f"number of statements where {meaning}",
                title=verdict,
                marked=0.0 if verdict == "violated" else None,
            )
            for verdict, meaning in VERDICTS.items()
        },
    },
)


@runtime_checkable
class CheckedForm(Protocol, metaclass=AsksTheInstance):
    """One form of a statement, checked."""

    @property
    def holds(self) -> bool: ...
    @property
    def excess(self) -> float: ...
    @property
    def cases(self) -> int: ...
    @property
    def words(self) -> str: ...


@runtime_checkable
class CheckedStatement(Protocol, metaclass=AsksTheInstance):
    """A statement, checked: `ctrans.theory` has the class."""

    @property
    def name(self) -> str: ...
    @property
    def section(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def says(self) -> str: ...
    @property
    def printed(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def seed(self) -> CheckedForm | None: ...
    @property
    def corrected(self) -> CheckedForm: ...
    @property
    def verdict(self) -> str: ...


@dataclass(frozen=True)
class StoredForm:
    """A `CheckedForm` of a JSON of version 1."""

    holds: bool
    excess: float
    cases: int
    words: str


@dataclass(frozen=True)
class StoredStatement:
    """A `CheckedStatement` of a JSON of version 1."""

    name: str
    section: int
    source: str
    says: str
    printed: str
    seconds: float
    seed: StoredForm | None
    corrected: StoredForm
    verdict: str


@dataclass(frozen=True)
class StoredVerification:
    """What `measured_in` reads of a JSON of version 1."""

    statements: dict[str, StoredStatement]
    findings: list[Finding]


def measured(results: Sequence[CheckedStatement], findings: Sequence[Finding]) -> Measured:
    """The table of the statements. A statement, or a section, stands where other tables have a
    model.
    """
    by_model: dict[str, list[Finding]] = {}
    if findings:
        by_model[""] = list(findings)
    by_statement: dict[str, list[str]] = {}
    if len(results) <= FEW:
        by_statement[""] = [_in_words(result) for result in results]
    of_statements = [value for result in results for value in _values(result)]
    return Measured(
        values=(*_by_section(results), *of_statements),
        answers=(answer(results),),
        findings=by_model,
        notes=by_statement,
    )


def _in_words(result: CheckedStatement) -> str:
    worst = result.corrected
    return (
        f"{result.name}, {result.verdict}: {result.says} (reached {worst.excess:.3g} in"
        f" {worst.cases} cases)"
    )


def _by_section(results: Sequence[CheckedStatement]) -> Iterator[Value]:
    """By section, how many statements have each verdict."""
    verdicts: dict[int, Counter[str]] = {}
    for result in results:
        verdicts.setdefault(result.section, Counter())[result.verdict] += 1
    for section, counts in verdicts.items():
        for verdict, count in counts.items():
            yield Value(_title(section), f"statements: {verdict}", count)


def _title(section: int) -> str:
    return f"{section}. {SECTIONS[section]}"


def answer(results: Sequence[CheckedStatement]) -> Answer:
    """How many statements hold."""
    counts = Counter(result.verdict for result in results)
    many = f"{len(results)} statements"
    if len(results) == 1:
        many = "1 statement"
    if counts["violated"]:
        names = ", ".join(result.name for result in results if result.verdict == "violated")
        return Answer(f"{counts['violated']} of {many} did not hold: {names}.", "bad")
    by_verdict = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    seconds = sum(result.seconds for result in results)
    return Answer(
        f"No counterexample was found to any of {many} ({by_verdict}; {seconds:.0f} s). This is no"
        " proof of them.",
        "good",
    )


def _values(result: CheckedStatement) -> Iterator[Value]:
    name = result.name
    yield Value(name, "section", result.section, words=_title(result.section))
    yield Value(name, "holds", None, words=result.verdict)
    yield Value(name, "what holds", None, words=result.says)
    yield Value(name, "worst case", result.corrected.excess)
    yield Value(name, "cases", result.corrected.cases)
    yield Value(name, "source of a statement", None, words=result.source)
    if result.printed:
        yield Value(name, "printed form", None, words=result.printed)
    if result.seed is not None and result.printed:
        fate = "holds"
        if not result.seed.holds:
            fate = f"fails: {result.seed.words}"
        yield Value(name, "fate of the printed form", None, words=fate)


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a JSON of version 1. Raises ConfigError for another object."""
    stored = from_json(StoredVerification, result)
    return measured(list(stored.statements.values()), stored.findings)
