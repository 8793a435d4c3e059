"""Limits and texts of `ctrans diagnose` that `ctrans screen` has too."""

MOST_SIMILAR, WORST_EXCESS = 0.99, 1.0
"""Limits that the screening shares: of the mean cosine of two tokens, and of the loss above
guessing in nats.
"""
LOSS_EXCESS = (
    "the loss on this text minus log V, the loss of equal probabilities, in nats; fresh weights"
    " differ by a few tenths by chance"
)
SATURATED = (
    "Add norms on queries and keys, raise the temperature of the softmax or warm it up (ctrans"
    " train --temperature-start), lower the learning rate, or decay W_Q and W_K. Do nothing if the"
    " model is trained and only used."
)
COLLAPSED = (
    "Add a norm before or behind each sublayer, add less per sublayer (--dt below 1), or use fewer"
    " blocks."
)
GUESSING = (
    "At the start of a training: a smaller head or embedding. For a trained model: compare its head"
    " and embedding with the checkpoint, and its tokenizer and text with those of the training."
)
