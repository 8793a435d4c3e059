"""What `compile` compiles: the objective where each field is evaluated once, else each sublayer."""

from __future__ import annotations

from ctrans.training.objective import Objective

VARIANTS = 4
"""Graphs of a sublayer: of a training and of an evaluation, each for a batch of one size and of any
size.
"""


def compile_objective(objective: Objective) -> None:
    """Compiles r_k(X) of each sublayer, or the whole objective if its scheme evaluates each field
    once.

    A solver's loop in one graph repeats a field for each of its evaluations: 8 times a segment with
    two steps of rk4. The compiler's time grows faster than that number. Sublayers that differ in
    their weights alone share one graph. The loop and the recomputation of `checkpoint` run outside
    of the graphs.
    """
    if objective.scheme.evaluates_once:
        objective.compile()
        return
    # the import takes two seconds
    import torch._dynamo.config as dynamo

    # a block that is used several times is compiled once
    sublayers = set(objective.model.depth.sublayers)
    # weights that are functions of depth have other constants in each block; above its limit torch
    # would not compile the rest
    most = VARIANTS * len(sublayers)
    dynamo.recompile_limit = max(dynamo.recompile_limit, most)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, most)
    for sublayer in sublayers:
        sublayer.compile()
