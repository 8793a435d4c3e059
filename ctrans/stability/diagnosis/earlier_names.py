"""Names of checks of `ctrans diagnose` in the previous version."""

EARLIER_NAMES = {
    "reads ahead": "reads future tokens",
    "outsized gain": "gain too large",
    "eps drowns the state": "eps dominates the norm",
    "embedding drowns the depth": "embedding dominates the depth",
    "positions drown the text": "positions dominate the text",
    "loud sublayer": "sublayer output too large",
    "quiet sublayer": "sublayer output too small",
    "huge sensitivity": "sensitivity too large",
    "no sensitivity": "sensitivity near zero",
    "decay far below lam*": "weight decay below threshold",
    "grown output norm": "output gains too large",
    "logits adrift": "logits drift",
    "tied weights that fight": "tied gradients oppose",
}
