"""Which cases of a test are run when there is little time: every value of every parameter, not all their combinations."""

from collections.abc import Mapping, Sequence


def covering(combinations: Sequence[Mapping[str, int]]) -> list[int]:
    """Places of a few combinations in which every parameter takes each of its values that it takes in all of them.

    Greedy: the next is the first of those that bring the most values that were not met yet.
    """
    missing = {pair for each in combinations for pair in each.items()}
    chosen = []
    while missing:
        new = [len(missing & set(each.items())) for each in combinations]
        chosen.append(new.index(max(new)))
        missing -= set(combinations[chosen[-1]].items())
    return sorted(chosen)
