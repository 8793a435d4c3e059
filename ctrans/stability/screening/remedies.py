"""What helps against what the screening calls a quantity outside of its limits, by that word."""

from __future__ import annotations

REMEDIES: dict[str, str] = {
    "starts worse than guessing": "a smaller head or embedding at the start; for a trained model: its own tokenizer and text of its kind",
    "does nothing": "larger initial weights, a larger dt, or a smaller embedding",
    "explodes": "a norm behind each sublayer (placement peri), a smaller dt, or smaller initial weights",
    "tokens collapse": "more weight on the residual branch (a norm before or behind the sublayer, a smaller dt), or fewer blocks",
    "outruns weights": "a norm before or behind each sublayer: without one nothing but weight decay holds it",
    "heads saturate": "norms on queries and keys, a higher temperature of the softmax or its warm-up (of ctrans's own: ctrans train "
    "--temperature-start), a lower learning rate, or weight decay on W_Q and W_K; in a trained model that is only used, nothing",
    "forgets its input": "a smaller dt or smaller initial weights, so that more of the state passes; fewer blocks",
    "contracts": "a smaller dt, or smaller initial weights",
    "expands": "a norm behind each sublayer (placement peri), a smaller dt, or smaller initial weights",
    "ill-conditioned": "a smaller dt or smaller initial weights, which keep a step near the identity",
    "does not learn": "a larger learning rate for that layer, or larger initial weights; look for dead gains (ctrans diagnose)",
    "overshoots": "a lower learning rate or a longer warm-up; a larger embedding, beside which a step is smaller",
    "layers learn unevenly": "learning rates by layer, or an initialisation that scales with depth (--init, placement deepnorm)",
    "tokens learn as one": "a larger embedding, or more weight on the residual branch: tokens are too much alike",
}
"""A quantity's new word for outside of its limits needs an entry here; a test looks."""
