"""A study small enough to be carried out many times."""

from ctrans.study.carry_out import prospect
from ctrans.study.description import Study

BASE = {
    "vocab_size": 256,
    "depth": 1,
    "width": 16,
    "heads": 2,
    "context": 8,
    "iterations": 4,
    "batch": 20,
    "warmup": 1,
    "eval_every": 2,
    "eval_windows": 2,
}


def given():
    """What a small study is made of."""
    return {"name": "small", "base": BASE, "vary": {"placement": ["pre", "peri"]}, "learning_rates": [1e-3, 1e-2]}


def small(name="small", **changes):
    return Study(**{**given(), "name": name, **changes})


def one_by_one(jobs):
    """An engine in this process."""
    for job in jobs:
        yield job, job.carry_out()


def left(study, store=None):
    return prospect(study, store).left
