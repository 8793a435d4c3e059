"""`ctrans verify`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from ctrans.cli.ending import directory_of, end
from ctrans.cli.request import WrittenRequest, command_of
from ctrans.given_files import read_file
from ctrans.option import COUNT, option
from ctrans.report.files import write_atomic
from ctrans.report.progress import progress_bar
from ctrans.report.verify_markdown import END, START, between_markers, failure, markdown_table
from ctrans.threads import choose_threads
from ctrans.verify.run import Result
from ctrans.verify.table import SECTIONS, select, verify_all
from ctrans.verify.theory_checks import findings_of
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyRequest(WrittenRequest):
    """The request of `verify`. Without `only` it checks all statements."""

    only: tuple[str, ...] = option(
        (),
        f"Repeatable: a statement, the beginning of names (theorem-4), or a section, {min(SECTIONS)} to {max(SECTIONS)}.",
        metavar="NAME",
        default_words="all",
    )
    cases: int = option(200, "Cases for each bound. Slow checks run a part of them.", limits=COUNT)
    seed: int = option(0, "Seed of the cases.")
    markdown: Path | None = option(
        None, "Write the table into this Markdown file, between its marker comments, or into a new file."
    )

    unshown = WrittenRequest.unshown | {"markdown"}


@command_of(VerifyRequest, "verify")
def command(request: VerifyRequest) -> None:
    """Check every statement of the theory, as printed in its paper and as corrected.

    The statements are lemmas, theorems, propositions and corollaries of Kan, Emadi, Xiong and Kim,
    and new ones. Each is checked on random cases; a printed form that is wrong gets a
    counterexample. `reached` is the worst distance found. For a bound it is measured/bound - 1:
    -0.1 is 10% of slack. For an equality it is a relative difference. For a slope, order or mean it
    is the distance to the allowed range, negative inside. The exit code is 1 if a form that should
    hold is violated. This takes one to two minutes. The directory gets verify.json and verify.md.

    \b
    ctrans verify
    ctrans verify --only 9 --cases 2000
    ctrans verify --only lemma-9 --only theorem-4
    """
    choose_threads(0)  # its cases are small
    statements = select(request.only)
    page = _page(request.markdown)
    directory = directory_of(request)
    results: list[Result] = []
    with progress_bar("verify", len(statements)) as advance:
        for result in verify_all(statements, request.cases, request.seed):
            results.append(result)
            advance(result.name)
    violated = [r for r in results if r.verdict == "violated"]
    table, seconds = markdown_table(results), sum(r.seconds for r in results)
    if request.markdown is not None:
        write_atomic(request.markdown, (between_markers(page, table) or f"{START}\n\n{table}\n{END}\n").encode())
    end(
        request,
        directory,
        result={
            "holds": not violated,
            "findings": findings_of(results),
            "seconds": seconds,
            "statements": {r.name: {**vars(r), "verdict": r.verdict} for r in results},
        },
        files={"verify.md": table.encode},
        failures=[failure(r) for r in violated],
    )


def _page(path: Path | None) -> str:
    """The text of the Markdown file, "" for a new file. Raises ConfigError for a file that is no
    text or has no markers.
    """
    if path is None or not os.path.exists(path):
        return ""
    try:
        page = read_file(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}; give a Markdown file") from None
    if page and between_markers(page, "") is None:
        raise ConfigError(f"{str(path)!r} has no place for the table: add the lines {START} and {END} there")
    return page
