"""Blocks of a checkpoint that lack weights which most other blocks have.

Blocks may differ on purpose: a hybrid has a state space where others have attention. Such a block
has weights that the others lack. A block whose file was cut, or whose names were lost, has only
some of those that most have. So only such a block counts, and a number that is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from ctrans.interop.config_errors import BLOCKS
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


def blocks_after_the_last(names: Iterable[str], config: Mapping[str, Any]) -> list[Reading]:
    """How many blocks the config says that come after the last block with weights; nothing if no
    weights are in numbered blocks, or the config has no number of blocks.

    This is for a family that is not built in, of which the config says no names. Blocks may be in
    lists of lists, and one block may be used several times: then nothing is lacking.
    """
    key, promised = _number_of_blocks(config)
    lists: dict[str, set[tuple[int, ...]]] = {}
    for name in names:
        path = ""
        numbers: tuple[int, ...] = ()
        for part in name.split("."):
            if BLOCK.fullmatch(part):
                numbers = (*numbers, int(part))
                lists.setdefault(path, set()).add(numbers)
                part = "#"
            path += f"{part}."
    if any(len(members) == promised for members in lists.values()):
        return []
    ends = [
        max(members)[0] for path, members in lists.items() if "#" not in path and len(members) > 1
    ]
    if not ends or promised <= max(ends) + 1:
        return []
    last = max(ends)
    figure = f"config.json says {key} = {promised}, and the last block with weights is block {last}"
    return [Reading(float(promised - last - 1), "the file", figure)]


def _number_of_blocks(config: Mapping[str, Any]) -> tuple[str, int]:
    """The entry of a config, or of its language model, with the number of blocks; 0 for none."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        for key in BLOCKS:
            number = part.get(key)
            if isinstance(number, int) and not isinstance(number, bool):
                return key, number
    return "", 0


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
