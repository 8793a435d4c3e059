"""The check of `ctrans verify`: a violated statement of theory as a finding."""

from __future__ import annotations

from collections.abc import Sequence

from ctrans.measure.findings import Check, Checks, Finding, Reading
from ctrans.theory.verify import Result

CHECKS = Checks(
    "theory",
    {
        "statement violated": Check(
            "reached",
            "measured/bound - 1 for a bound, the relative difference for an equality",
            "broken",
            "each statement's own tolerance, for rounding",
            "The form of the statement that should hold fails for this case.",
            "Report it with the command and verify.json.",
        )
    },
)


def findings_of(results: Sequence[Result]) -> list[Finding]:
    """A finding for each violated statement."""
    return [
        CHECKS.finding(
            "statement violated",
            Reading(
                result.corrected.excess, f"§{result.section}, {result.name}", result.corrected.words
            ),
            limit=f"above {result.corrected.tolerance:.2g}",
            source=result.source,
        )
        for result in results
        if result.verdict == "violated"
    ]
