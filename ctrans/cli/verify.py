"""`ctrans verify`."""

from __future__ import annotations

import dataclasses

from ctrans.base.option import COUNT, option
from ctrans.base.theory_sections import SECTIONS
from ctrans.base.threads import choose_threads
from ctrans.cli.ending import directory_of, end
from ctrans.cli.request import WrittenRequest, command_of
from ctrans.examine.verified import measured
from ctrans.report.progress import progress_bar
from ctrans.theory.all_statements import select, verify_all
from ctrans.theory.theory_checks import findings_of
from ctrans.theory.verify import Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyRequest(WrittenRequest):
    """The request of `verify`. Without `only` it checks all statements."""

    only: tuple[str, ...] = option(
        (),
        "Repeatable: a statement, the beginning of names (theorem-4), or a section,"
        f" {min(SECTIONS)} to {max(SECTIONS)}.",
        metavar="NAME",
        default_words="all",
    )
    cases: int = option(100, "Cases for each bound. Slow checks run a part of them.", limits=COUNT)
    seed: int = option(0, "Seed of the cases.")


@command_of(VerifyRequest, "verify")
def command(request: VerifyRequest) -> None:
    """Check every statement of the theory, as printed in its paper and as corrected.

    The statements are lemmas, theorems, propositions and corollaries of Kan, Emadi, Xiong and Kim,
    and new ones. Each is checked on random cases; a printed form that is wrong gets a
    counterexample. `reached` is the worst distance found. For a bound it is measured/bound - 1:
    -0.1 is 10% of slack. For an equality it is a relative difference. For a slope, order or mean it
    is the distance to the allowed range, negative inside. The exit code is 1 if a form that should
    hold is violated. This takes a minute. The directory gets verify.json.

    \b
    ctrans verify
    ctrans verify --only 9 --cases 2000
    ctrans verify --only lemma-9 --only theorem-4
    """
    choose_threads(0)  # its cases are small
    statements = select(request.only)
    directory = directory_of(request)
    results: list[Result] = []
    with progress_bar("verify", len(statements)) as advance:
        for result in verify_all(statements, request.cases, request.seed):
            results.append(result)
            advance(result.name)
    violated = [r for r in results if r.verdict == "violated"]
    end(
        request,
        directory,
        result={
            "holds": not violated,
            "findings": findings_of(results),
            "seconds": sum(r.seconds for r in results),
            "statements": {r.name: {**vars(r), "verdict": r.verdict} for r in results},
        },
        measured=measured(results, findings_of(results)),
        failures=[_failure(r) for r in violated],
    )


def _failure(r: Result) -> str:
    """The case that violates a corrected form."""
    worst = r.corrected
    return (
        f"{r.name} ({r.source}): {r.says}\n  violated by {worst.excess:.6g} > {worst.tolerance:g}"
        f" in case {worst.case} of {worst.cases}: {worst.words}"
    )
