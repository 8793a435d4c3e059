"""`ctrans compare`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ctrans.base.option import option
from ctrans.cli.diagnose import STOPPED
from ctrans.cli.ending import directory_of, end
from ctrans.cli.inputs import read_batch
from ctrans.cli.model_request import ComparisonRequest
from ctrans.cli.model_sources import find_models
from ctrans.cli.request import command_of
from ctrans.examine.compared import as_object, measured
from ctrans.examine.comparison.compare import compare
from ctrans.report.progress import progress_bar
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareRequest(ComparisonRequest):
    """The request of `compare`."""

    fail_on: str | None = option(
        None,
        "Exit with code 3 if a part changed by more than rounding. All files are written before.",
        choices={"change": None},
    )

    common: ClassVar[frozenset[str]] = (ComparisonRequest.common - {"norm"}) | {"fail_on"}


@command_of(CompareRequest, "compare")
def command(request: CompareRequest) -> None:
    """Say where two models part, and whether it matters: a port, a fused kernel, a precision.

    Both MODELs read the same text. Each part of the second one, from the embedding to the head,
    runs on the first one's states. What it does otherwise there is its own, and not inherited. What
    rounding would make of the part is measured too, which tells a fault from rounding. The
    difference of the losses is divided among the parts: the shares add up to it.

    \b
    ctrans compare models/llama models/port
    ctrans compare models/gpt2 models/gpt2-bf16 --file book.txt
    ctrans compare run/step-1000 other/step-1000 --fail-on change
    ctrans compare --python model.py:eager --python model.py:fused --example model.py:batch

    Exit codes: 0 success, changed or not. 1 the computation failed. 2 invalid input.
    3 --fail-on found a change.
    """
    sources = find_models(request)
    if len(sources) != 2:
        raise ConfigError(
            f"ctrans compare takes two models, and {len(sources)} are given: name two"
        )
    has_loss = all(source.opened is None or source.opened.loss != "none" for source in sources)
    batch = read_batch(request, sources, targets=has_loss)
    directory = directory_of(request)
    first_name, second_name = (source.name for source in sources)
    with progress_bar("compare", sources[0].segments + 2) as advance:

        def progress(part: int) -> None:
            advance(f"part {part}", 1)

        first, second = (source.model(request) for source in sources)
        found = compare(first, second, batch.tokens, batch.targets, progress=progress)
    failures = []
    if request.fail_on and found.changed:
        count = len(found.changed)
        parts = "1 part" if count == 1 else f"{count} parts"
        failures.append(f"{parts} changed (--fail-on change)")
    end(
        request,
        directory,
        inputs=batch,
        result=as_object(found),
        measured=measured(first_name, second_name, found),
        failures=failures,
        code=STOPPED,
    )
