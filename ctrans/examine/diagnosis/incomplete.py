"""Blocks of a checkpoint that lack weights which most other blocks have.

Blocks may differ on purpose: a hybrid has a state space where others have attention. Such a block
has weights that the others lack. A block whose file was cut, or whose names were lost, has only
some of those that most have. So only such a block counts, and a number that is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from ctrans.interop.weight_names import BLOCK
from ctrans.measure.findings import Reading

QUANTITY = "weights that a block lacks"
SUBLAYERS = "sublayers."
FEWEST_BLOCKS = 3
FEWEST_WEIGHTS = 3
"""A list whose members have fewer weights is no list of blocks: a Sequential leaves out numbers."""
NAMED = 3


def incomplete_blocks(names: Iterable[str]) -> list[Reading]:
    """For each block how many weights it lacks that most blocks of its list have."""
    lists: dict[str, dict[int, set[str]]] = {}
    for name in names:
        number = BLOCK.search(name)
        if number is not None:
            prefix = name[: number.start(1)]
            k = int(number[1])
            role = name[number.end(1) :]
            if prefix.endswith(SUBLAYERS):  # a block of ours has two
                k, which = divmod(k, 2)
                role = f".{which}{role}"
            lists.setdefault(prefix, {}).setdefault(k, set()).add(role.lstrip("."))
    readings = []
    for prefix, blocks in lists.items():
        counts = Counter(role for roles in blocks.values() for role in roles)
        usual = {role for role, count in counts.items() if 2 * count > len(blocks)}
        if len(blocks) < FEWEST_BLOCKS or len(usual) < FEWEST_WEIGHTS:
            continue
        for k in sorted(blocks):
            lacking = sorted(usual - blocks[k])
            if not blocks[k] <= usual:
                lacking = []  # it is of another kind
            place = f"block {k}: {prefix}{k}"
            if prefix.endswith(SUBLAYERS):
                place = f"block {k}"
            readings.append(Reading(float(len(lacking)), place, _figure(lacking, usual), k))
        for before, behind in pairwise(sorted(blocks)):
            if behind > before + 1:
                readings.append(_gap(before + 1, behind - 1, len(usual)))
    return readings


def _gap(first: int, last: int, usual: int) -> Reading:
    """Numbers of blocks that have no weights, although a later one has."""
    place = f"block {first}" if first == last else f"block {first} to block {last}"
    return Reading(float(usual), place, "no weights at all, and a later block has some", first)


def _figure(lacking: list[str], usual: set[str]) -> str:
    if not lacking:
        return "it lacks nothing that most blocks have"
    words = f"of {len(usual)} weights that most blocks have it lacks {', '.join(lacking[:NAMED])}"
    if len(lacking) > NAMED:
        words += f" and {len(lacking) - NAMED} more"
    return words
