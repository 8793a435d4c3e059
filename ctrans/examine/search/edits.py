"""The table of edits: what may have gone wrong when a model was ported, loaded or changed, each
undone.
"""

from __future__ import annotations

from collections.abc import Mapping

from ctrans.examine.search.block_edits import (
    blocks_in_another_order,
    exchanged_matrices,
    exchanged_thirds,
    gains,
    left_out,
    scaled,
    transposed,
    turned_signs,
)
from ctrans.examine.search.edit import Edit, EditKind, Subject, in_blocks
from ctrans.examine.search.head_edits import (
    grouped_queries,
    heads_of_thirds,
    key_heads,
    rotary_halves,
)
from ctrans.examine.search.whole_edits import (
    larger_outputs,
    other_computation,
    other_inputs,
    outside_of_blocks,
)

EDITS: dict[str, EditKind] = {
    "inputs": other_inputs,
    "computation": other_computation,
    "larger outputs": larger_outputs,
    "outside of blocks": outside_of_blocks,
    "order of blocks": blocks_in_another_order,
    "exchanged": in_blocks(exchanged_matrices),
    "thirds": in_blocks(exchanged_thirds),
    "transposed": in_blocks(transposed),
    "rotary halves": in_blocks(rotary_halves),
    "grouped queries": in_blocks(grouped_queries),
    "heads of thirds": in_blocks(heads_of_thirds),
    "key heads": in_blocks(key_heads),
    "gains": in_blocks(gains),
    "scaled": scaled,
    "sign": in_blocks(turned_signs),
    "left out": in_blocks(left_out),
}
"""By name, in the order in which they are tried: first in all blocks, then in single ones."""


def edits_of(subject: Subject, kinds: Mapping[str, EditKind] = EDITS) -> list[Edit]:
    """All edits of a model, those of all blocks before those of single ones."""
    edits = [edit for kind in kinds.values() for edit in kind(subject)]
    return sorted(edits, key=lambda edit: edit.single)
