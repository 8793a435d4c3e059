"""What `compare` finds: how the parts and weights of two models differ, and what explains it."""

from __future__ import annotations

from dataclasses import dataclass

from ctrans.examine.comparison.explanations import Explanation
from ctrans.examine.comparison.kept_parts import KeptParts
from ctrans.examine.comparison.parts import HEAD
from ctrans.examine.comparison.sentences import answer
from ctrans.examine.comparison.stages import Stage

CHANGED = 4.0
"""A defect so many times as large as the rounding that was measured is a change."""


@dataclass(frozen=True)
class PartDifference:
    """What is different in a part of two models.

    - `name`: the part in words
    - `defect`: |e_k| as a share of what the part makes, root mean square. Of a sublayer that is
      what it adds, or the next state if that differs by more than rounding explains
    - `shown`: 1 if that is of the next state, else 0
    - `rounding`: the same for what rounding makes of the first model's part
    - `ratio`: the largest ratio of defect to rounding, of root mean squares and of largest entries;
      0 if the part is equal to the bit
    - `behind`: |X_B - X_A|/|X_A| behind the part, both models on their own; of the head, that of
      the logits
    - `amplified`: how many times as large the part makes a difference that it inherits,
      |Psi_k(X'_k) - Psi_k(X_k)|/|X'_k - X_k|; nan of the embedding and the head, and for no
      difference
    - `at_end`: if rounding alone explains all, what that of the part makes of the last state, as a
      share of it; nan of the head, and without a loss
    - `share`: the part's share of L_B - L_A; nan without a loss
    - `first_order`: <P, e_k>; nan where there is no costate
    """

    name: str
    defect: float
    shown: int
    rounding: float
    ratio: float
    behind: float
    amplified: float
    at_end: float
    share: float
    first_order: float

    @property
    def changed(self) -> bool:
        """Whether rounding does not explain the defect."""
        return not self.ratio <= CHANGED


@dataclass(frozen=True)
class WeightDifference:
    """A weight that differs: its names, its part, and how the second follows from the first."""

    name: str
    other_name: str
    part: str
    relation: str
    kind: str
    distance: float


@dataclass(frozen=True)
class ModelComparison:
    """What `compare` found.

    - `losses`: L_A and L_B; nan without a loss
    - `rounding_of_loss`: what rounding alone changes of the first one's loss, root mean square
    - `parts`: along the depth
    - `inside`: of the first part that changed, its stages
    - `explanations`: edits of the first model that take the defect of that part down to rounding;
      of the second, if the first is a recording
    - `kept`: if rounding alone explains all, the difference of the last states, and what is left of
      it if one, two or three parts are those of the model of more digits. Empty without targets
    - `weights`: those that differ; `equal_weights` and `unmatched` count the others
    - `missing`: what was not measured, and why
    """

    losses: tuple[float, float]
    rounding_of_loss: float
    parts: tuple[PartDifference, ...]
    inside: tuple[Stage, ...]
    explanations: tuple[Explanation, ...]
    kept: tuple[KeptParts, ...]
    weights: tuple[WeightDifference, ...]
    equal_weights: int
    unmatched: tuple[str, ...]
    missing: dict[str, str]

    def __str__(self) -> str:
        """The answer in sentences."""
        return answer("the first model", "the second model", self).text

    @property
    def difference(self) -> float:
        """L_B - L_A."""
        first, second = self.losses
        return second - first

    @property
    def changed(self) -> list[PartDifference]:
        """The parts whose defect rounding does not explain, along the depth."""
        return [part for part in self.parts if part.changed]

    @property
    def head(self) -> PartDifference | None:
        """The head; None beside a recording without logits."""
        last = self.parts[-1]
        return last if last.name == HEAD else None

    @property
    def sublayers(self) -> list[PartDifference]:
        """The parts between the embedding and the head."""
        return [part for part in self.parts[1:] if part.name != HEAD]

    @property
    def stage(self) -> Stage | None:
        """The first stage that changed of the first sublayer that did."""
        return next((stage for stage in self.inside if stage.changed), None)

    @property
    def equal(self) -> bool:
        """Whether no part differs in any bit."""
        return all(part.ratio == 0 for part in self.parts)
