"""What helps against what the screening calls a quantity outside of its limits, by that word or by the quantity."""

from __future__ import annotations

SMALLER_STEP = "a factor below 1 on what each sublayer adds (--dt)"
LARGER_STEP = "a larger factor on what each sublayer adds (--dt)"
NORM_BEHIND = "a norm behind each sublayer where there is none (ctrans's own GPT: --placement peri)"
SMALLER_SCORES = (
    "smaller attention scores: divide them by sqrt(d_head), norms on queries and keys (ctrans's own GPT: --qk-norm rms), or smaller W_Q "
    "and W_K"
)
REMEDIES: dict[str, str] = {
    "starts worse than guessing": "a smaller head or embedding at the start; for a trained model: its own tokenizer and text of its kind",
    "does nothing": f"larger initial weights, {LARGER_STEP}, or a smaller embedding",
    "explodes": f"{SMALLER_STEP}, or smaller initial weights; where the attention path explodes too, what helps there comes first",
    "tokens collapse": f"a norm before or behind each sublayer, {SMALLER_STEP}, or fewer blocks",
    "outruns weights": "a norm before or behind each sublayer: without one nothing but weight decay holds it",
    "heads saturate": "norms on queries and keys, a higher temperature of the softmax or its warm-up ("
    "ctrans train --temperature-start), a lower learning rate, or weight decay on W_Q and W_K; "
    "in a trained model that is only used, nothing",
    "forgets its input": f"{SMALLER_STEP}, or smaller initial weights, so that more of the state passes; fewer blocks",
    "contracts": f"{SMALLER_STEP}, or smaller initial weights",
    "expands": f"{SMALLER_STEP}, or smaller initial weights",
    "ill-conditioned": f"{SMALLER_STEP}, or smaller initial weights, which keep a step near the identity",
    "does not learn": "a larger learning rate for that layer, or larger initial weights; look for dead gains (ctrans diagnose)",
    "overshoots": "a lower learning rate or a longer warm-up; a larger embedding, beside which a step is smaller",
    "layers learn unevenly": "learning rates by layer, or an initialisation that scales with depth (ctrans's own GPT: --init, or "
    "--placement deepnorm)",
    "tokens learn as one": "a larger embedding, or sublayers that add less to it: tokens are too much alike",
}
"""A quantity's new word for outside of its limits needs an entry here; a test looks. They are for any model, and --dt is every model's."""
OF_QUANTITIES = {
    "attention path": SMALLER_SCORES,
    "growth exponent": f"{NORM_BEHIND}, {SMALLER_STEP}, or smaller initial weights",
}
"""Where a quantity's own word is not all that is to be said."""


def remedy(quantity: str, word: str) -> str | None:
    """What helps where that quantity is called so; None for a word that no limit has."""
    return OF_QUANTITIES.get(quantity, REMEDIES.get(word))
