"""An edit of a model, and what the kinds of edits are made of.

An edit is judged by the loss alone, so none needs to know what a weight is for. Names serve only to
find peers in other blocks, and queries and keys where an edit concerns the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from ctrans.examine.search.sites import Block, WeightSites

Changes = dict[str, Tensor]
"""New weights by name."""
MakeChanges = Callable[[], Changes]
Act = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change of a model, of what it reads, or of how it computes.

    - `words`: what is changed, as in "with ... the loss falls"
    - `place`: where
    - `weights`: makes the new weights by name
    - `inputs`: what becomes of the model's inputs
    - `outputs`: what becomes of the logits, or of the tensor that the model returns
    - `during`: a context in which the model runs
    - `single`: whether it is of one block of several
    - `further`: the same edit, stronger; None if there is no such thing
    """

    words: str
    place: str
    weights: MakeChanges = dict
    inputs: Act | None = None
    outputs: Act | None = None
    during: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    single: bool = False
    further: Callable[[], Edit] | None = None


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is searched: the weights of a module, and a batch of its inputs.

    `classes` is the number of its logits, `vocabulary` that of the token ids that it reads; 0 if
    they are not known.
    """

    sites: WeightSites
    inputs: Tensor
    classes: int
    vocabulary: int = 0

    @property
    def reads_ids(self) -> bool:
        return not self.inputs.is_floating_point()


EditKind = Callable[[Subject], Iterator[Edit]]
OfBlock = Callable[[WeightSites, Block], Iterator[tuple[str, MakeChanges]]]


def in_blocks(of_block: OfBlock) -> EditKind:
    """The edits of a block, in all blocks that are alike at once, and in each alone."""

    def kind(subject: Subject) -> Iterator[Edit]:
        sites = subject.sites
        for group in sites.alike():
            changes = [dict(of_block(sites, block)) for block in group]
            if len(group) > 1:
                for words in changes[0]:
                    several = [of_one[words] for of_one in changes if words in of_one]
                    yield Edit(
                        f"{words} in all {len(group)} blocks",
                        title_of(group),
                        partial(_together, several),
                    )
            for block, of_one in zip(group, changes, strict=True):
                for words, change in of_one.items():
                    yield Edit(f"{words} in {block.title}", block.title, change, single=True)

    return kind


def _together(changes: list[MakeChanges]) -> Changes:
    merged: Changes = {}
    for change in changes:
        merged |= change()
    return merged


def title_of(group: list[Block]) -> str:
    """The first and the last block of several."""
    if len(group) == 1:
        return group[0].title
    return f"{group[0].title} to {group[-1].title}"


def changed(sites: WeightSites, names: tuple[str, ...], act: Act) -> Changes:
    """These weights after a function of each."""
    return {name: act(sites.weights[name]) for name in names}


def times(factor: float) -> Act:
    """Multiplication by a factor."""
    return lambda weight: weight * factor


def transpose(weight: Tensor) -> Tensor:
    """W' of a matrix W."""
    return weight.T.contiguous()
