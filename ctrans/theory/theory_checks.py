"""The check of `ctrans verify`: a violated statement of theory as a finding."""

from __future__ import annotations

from collections.abc import Sequence

from ctrans.measure.findings import Check, Finding, Reading
from ctrans.measure.measures import MEASURES, Measure, checks_of
from ctrans.theory.run import Result

MEASURES.add(
    "ctrans verify",
    {
        "reached": Measure(
            formula="measured/bound - 1 for a bound, the relative difference for an equality",
            scope="run",
            checks={
                "statement violated": Check(
                    severity="broken",
                    source="each statement's own tolerance, for rounding",
                    impact="The form of the statement that should hold fails for this case.",
                    remediation="Report it with the command and verify.json.",
                )
            },
        )
    },
    topic="theory",
)
CHECKS = checks_of("theory")


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
