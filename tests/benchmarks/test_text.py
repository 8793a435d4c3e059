import math
from collections import Counter

import numpy as np
import pytest

from benchmarks import papers_gpu, text

SIZE = 5


def ids(count, seed):
    return np.random.default_rng(seed).integers(0, SIZE - 1, count)


def share(learned, context, target):
    """p(target | context), by counting."""
    if not context:
        return (learned.count(target) + 1) / (len(learned) + SIZE)
    n = len(context)
    behind = Counter(
        learned[i + n] for i in range(len(learned) - n) if tuple(learned[i : i + n]) == context
    )
    lower = share(learned, context[1:], target)
    total = sum(behind.values())
    if not total:
        return lower
    kept = max(behind[target] - text.DISCOUNT, 0)
    return kept / total + text.DISCOUNT * len(behind) / total * lower


def test_floors_are_those_of_counting():
    train, validation = ids(60, 0), np.append(ids(40, 1), SIZE - 1)
    found = text.floors(train, validation, SIZE)
    learned, asked = train.tolist(), validation.tolist()
    for n, name in enumerate(("unigram", "bigram", "trigram")):
        losses = [
            -math.log(share(learned, tuple(asked[i - n : i]), asked[i]))
            for i in range(2, len(asked))
        ]
        assert found[name] == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.parametrize("context", [(), (0,), (1, 2), (3, 3)])
def test_shares_sum_to_one(context):
    learned = ids(60, 0).tolist()
    assert sum(share(learned, context, v) for v in range(SIZE)) == pytest.approx(1, rel=1e-12)


def test_stretches_are_the_text_in_order():
    written = "".join(f"{i}: {'word ' * (i % 7)}\n" for i in range(40_000))
    pieces = list(text.stretches(written))
    assert "".join(pieces) == written
    assert len(pieces) > 2
    assert all(piece.endswith("\n") for piece in pieces)


def test_lines_that_name_an_edition_are_left_out():
    entry = "Coagulate \\Co*ag\\, v. i.\n   To undergo\n   coagulation.\n   [1913 Webster]\n\nNext"
    assert text.cleaned(entry) == "Coagulate \\Co*ag\\, v. i. To undergo coagulation.\nNext"


def test_each_cell_comes_once():
    cells = list(papers_gpu.cells())
    assert len(set(cells)) == len(cells) == 24
