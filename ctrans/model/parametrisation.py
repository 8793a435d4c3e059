"""Parametrisations: how the initial weights, the branches, the logits and the rates of a model
change with its width and depth, so that the best rate of a small model stays the best.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

WeightGroup = Literal["matrices", "vectors", "ends"]
"""Weights with one rule: matrices of the depth, vectors of the depth, and all weights outside."""


@dataclass(frozen=True)
class StepGrowth:
    """How an optimiser's step at rate 1 grows with the width n, if the logits are divided by n.

    - `matrices`: the power of n of the norm |dW x|/|x| of a hidden matrix's step
    - `entries`: the power of n of an entry of the step of another weight
    - `of_gradient`: whether the step is as large as the gradient, and so follows dt
    """

    matrices: float
    entries: float = 0.0
    of_gradient: bool = False


@dataclass(frozen=True)
class Parametrisation:
    """Powers of n = width/base width and of l = blocks/base blocks.

    - `drawn`: matrices of the depth are those of the base times n^drawn. None: their initialisation
      sees their own shape
    - `logits`: the logits are multiplied by n^logits
    - `branch`: dt is multiplied by l^branch. -1 keeps the depth-time T
    - `update`: the step of a sublayer's weights has the norm l^update
    - `rates`: 1 divides each rate by the growth of the optimiser's step with the width. 0 leaves it
    """

    drawn: float | None = None
    logits: float = 0.0
    branch: float = 0.0
    update: float = 0.0
    rates: float = 0.0

    def scales(
        self, part: WeightGroup, wider: float, deeper: float, steps: StepGrowth
    ) -> tuple[float, float]:
        """The factors of the learning rate and of Adam's epsilon for a part of the weights. The
        weight decay is divided by that of the rate, so that their product stays the same.

        A step should have the norm l^update in the depth and 1 outside, as an operator for a
        matrix and by entry otherwise. The rate is this over the step's norm at rate 1. A gradient
        by entry is like n^logits, and l^branch in the depth.
        """
        if part == "matrices":
            growth = steps.matrices
        else:
            growth = steps.entries
        rate = wider ** (-self.rates * growth)
        epsilon = wider**self.logits
        if part == "ends":
            return rate, epsilon
        update_over_gradient = self.update
        if steps.of_gradient:
            update_over_gradient -= self.branch
        return rate * deeper**update_over_gradient, epsilon * deeper**self.branch


STANDARD = "standard"
MUP = Parametrisation(drawn=-0.5, logits=-1.0, rates=1.0)
PARAMETRISATIONS: dict[str, Parametrisation] = {
    STANDARD: Parametrisation(),
    "mup": MUP,
    "depth_mup": replace(MUP, branch=-0.5, update=-0.5),
    "completep": replace(MUP, branch=-1.0),
}
"""By name.

- "mup": for the width (arXiv 2203.03466, table 8, with a multiplier of the logits)
- "depth_mup": branches of one map also for the depth (2310.02244; 2603.00541 for k = 1)
- "completep": branches of two and more maps, as ours, also for the depth (2505.01618, alpha = 1;
  2603.00541 for k >= 2)
"""
