"""An experiment: do the initial weights of an architecture predict how its training goes?

A third of the architectures is sealed. Its trainings may not begin before a predictor is committed.
`python -m benchmarks.prediction --help` shows the stages; docs/why/prediction.md has what came out.
"""
