"""`ctrans diagnose`."""

from __future__ import annotations

import dataclasses
import textwrap

from ctrans.cli.ending import directory_of, end
from ctrans.cli.inputs import read_batch
from ctrans.cli.model_sources import ModelSource, find_models
from ctrans.cli.request import ComparisonRequest, command_of
from ctrans.findings import as_object, limits_in_words
from ctrans.option import NOT_NEGATIVE, Range, option
from ctrans.report.progress import progress_bar
from ctrans.stability.diagnosis.diagnose import Diagnosis, diagnose, merged
from ctrans.stability.diagnosis.diagnostic_checks import CHECKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseRequest(ComparisonRequest):
    """The request of `diagnose`."""

    weight_decay: float | None = option(
        None, "The training's weight decay. ctrans compares it with dt lam*.", metavar="LAM", limits=NOT_NEGATIVE
    )
    seeds: int = option(
        1,
        "Repeat the diagnosis on this many parts of the text, for a seeded model with new weights: findings get error bars.",
        limits=Range(1, 1000),
    )


LIMITS = "\b\nEvery finding with its severity, what is measured, its limit, and who set it:\n" + "\n".join(
    textwrap.fill(line, 78, initial_indent="- ", subsequent_indent="  ") for line in limits_in_words(CHECKS)
)


@command_of(DiagnoseRequest, "diagnose", epilog=LIMITS)
def command(request: DiagnoseRequest) -> None:
    """List what is wrong with a model, most severe first: place, figure, effect and what helps.

    MODEL is a local Hugging Face directory, nanoGPT's ckpt.pt, or a model that ctrans saved;
    without one, a seeded GPT. ctrans diagnoses several models, such as checkpoints of one training,
    on the same text. One pass over the text looks for dead gains, saturated heads, massive
    activations, large sensitivities, collapsed tokens, blocks without effect, a weight decay that
    does not bound the weights, grown output norms, drifting logits, tied weights with opposing
    gradients, and non-finite numbers. The directory gets diagnose.json and diagnose.png.

    \b
    ctrans diagnose models/bert
    ctrans diagnose out/train --weight-decay 0.1 --seeds 5
    ctrans diagnose --placement none --init large
    """
    seeds = request.seeds
    found = find_models(request)
    opened = found[0].opened  # without a loss only some checks run
    batch = read_batch(request, found, targets=opened is None or opened.loss != "none", walks=seeds)
    directory = directory_of(request)
    results: dict[str, Diagnosis] = {}
    with progress_bar("diagnose", 2 * seeds * sum(source.segments for source in found)) as advance:
        for i, source in enumerate(found):
            several = []
            for s in range(seeds):
                x, y = batch.tokens[s::seeds], None if batch.targets is None else batch.targets[s::seeds]
                model = _drawn_anew(request, source, i, s).model(request)
                several.append(diagnose(model, x, y, weight_decay=request.weight_decay, progress=advance.of(source.name)))
            results[source.name] = several[0] if seeds == 1 else merged(several)
    end(
        request,
        directory,
        inputs=batch,
        result={"checks": {name: as_object(check) for name, check in CHECKS.items()}, "placements": results},
    )


def _drawn_anew(request: DiagnoseRequest, source: ModelSource, i: int, s: int) -> ModelSource:
    """The model; for repetition s > 0 of a seeded model, the same with seed + s."""
    seeded = not source.trained and source.opened is None
    return find_models(dataclasses.replace(request, seed=request.seed + s))[i] if s and seeded else source
