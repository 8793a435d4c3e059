"""When an edit counts as found."""

QUANTITY = "fall of the loss by an edit"
LEAST_FALL = 0.1
"""The least fall of a loss, in nats."""
LARGE_FALL = 1.0
"""A fall that counts even if the edited model predicts worse than counting tokens, in nats."""
ERRORS = 5.0
"""The least fall in standard errors of the paired differences."""
FEWEST_TARGETS = 16
"""With fewer in a half of the sequences, a standard error means nothing."""
MOST_EDITS = 3
"""So many faults are undone after one another."""
