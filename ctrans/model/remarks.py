"""Remarks on an architecture that can be built, and is hardly meant."""

from __future__ import annotations

from ctrans.dynamics.norm import NORMS
from ctrans.model.config import GPTConfig


def remarks_on(config: GPTConfig) -> list[str]:
    """One sentence for each kind of norm that is constant: x minus its mean is 0 for a row x of
    one entry, so that a LayerNorm of width 1 is beta.
    """
    remarks = []
    has_norms = not config.is_stack or config.placement != "none"
    if config.width == 1 and has_norms and getattr(NORMS[config.norm], "centred", False):
        remarks.append(
            f"norm {config.norm} of width 1 is the constant beta whatever the text, because it"
            " subtracts the mean of a single entry: choose norm rmsnorm or a larger width"
        )
    if config.qk_norm == "layer" and config.width == config.heads:
        remarks.append(
            "qk_norm layer with heads of width 1 makes all queries equal, and all keys, because it"
            " subtracts the mean of a single entry: choose qk_norm rms or fewer heads"
        )
    return remarks
