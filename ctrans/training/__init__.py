"""Training: data, objective, optimiser, the loop, its checkpoints, and many processes."""
