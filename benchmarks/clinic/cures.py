"""The treatment that carries out each check's advice, and the placebo."""

from __future__ import annotations

import hashlib

from ctrans.measure.findings import Finding

ADVICE: dict[str, str] = {
    # of ctrans diagnose
    "not finite": "restore",
    "reads future tokens": "mask",
    "tokens read both ways": "nothing",
    "dead gain around the state": "median gains",
    "dead gain of an output norm": "median gains",
    "dead gain of an input norm": "nothing",
    "dead gain outside the depth": "median gains",
    "dead norm": "unit gains",
    "zero weight": "redraw zeros",
    "heads of zeros": "redraw zeros",
    "gain too large": "median gains",
    "eps dominates the norm": "small eps",
    "embedding dominates the depth": "smaller embedding",
    "positions dominate the text": "smaller positions",
    "sublayer output too large": "scale by neighbours",
    "sublayer output too small": "scale by neighbours",
    "dead sublayer": "revive",
    "sensitivity too large": "scale by neighbours",
    "sensitivity near zero": "scale by neighbours",
    "saturated heads": "smaller scores",
    "massive activation": "nothing",
    "rank collapse": "smaller steps",
    "unused block": "prune",
    "weight decay below threshold": "nothing",
    "output gains too large": "bounded gains",
    "logits drift": "smaller head if guessing",
    "worse than guessing": "restore ends",
    "tied gradients oppose": "nothing",
    "not the same twice": "no hooks",
    "silenced outlier channel": "nothing",
    "scores of another scale": "scores by neighbours",
    "most heads saturated": "restore queries",
    "dead units": "redraw units",
    "sublayer raises the loss": "restore",
    "targets are not predicted": "restore ends",
    "worse than counting": "restore ends",
    "blocks with equal weights": "restore",
    "block untrained": "restore",
    "weight untrained": "restore",
    "an edit lowers the loss": "nothing",
    # of the monitor
    "nothing moves": "train all as usual",
    "updates near zero": "usual eps and scale",
    "targets leak": "own data and mask",
    "near the end of float16": "nothing",
    "attention logits grow": "hold scores",
    "output logits drift": "z-loss",
    "embedding grows": "slow embedding",
    "hidden states grow too large": "hold maps",
    "gradients explode by depth": "warm-up",
    "gradients vanish by depth": "warm-up",
    "gradient spike": "nothing",
    "loss spike": "back and skip",
    "updates too large": "back and slower",
    "Adam's second moments too small": "usual betas",
    "Adam's second moments too large": "own data and scale",
    "beyond the edge of stability": "warm-up",
    "held loss rises": "nothing",
    "attention collapsed": "lower rate",
    "step larger than the state": "smaller steps",
    "dead layer": "revive",
    "sublayer outgrows its past": "restore",
    "frozen layer": "train all",
    "router collapse": "redraw router",
    "loss stays high": "back and own data",
    "embedding updates too large": "back and slow embedding",
    "softmax twice": "plain loss",
    "gradients are not reset": "reset gradients",
    "Adam remembers too long": "usual betas",
    "learning rate has ended": "steps as planned",
    "loss is raised": "plain loss",
    "accumulation is not divided": "divide gradients",
    "targets count unequally": "nothing",
    "no better than guessing": "whole loop as usual",
    "targets unrelated to inputs": "own data and mask",
    "targets are not the next tokens": "own data and mask",
    "padding is predicted": "ignore padding",
    "same batch again": "own data and mask",
    "one token fills the batch": "own data and mask",
    "tokens unlike those before": "back and own data",
    "weights in no group": "train all",
    "embedding or head in no group": "train all",
    "steps are lost to rounding": "float32",
    "optimizer forgot its past": "warm-up",
    "gains decay": "gains without decay",
    "targets are smoothed away": "plain loss",
    "weights are forgotten": "nothing",
}
"""The treatment that carries out the advice of each check: the first act that the text names and
that code can do. A name that both the diagnosis and the monitor have has one entry; `advice`
chooses the monitor's for "not finite".
"""


def advice(finding: Finding) -> str:
    if finding.check == "not finite" and finding.step is not None:
        return "back and skip"
    return ADVICE.get(finding.check, "nothing")


def placebo(own: str, key: str, *, monitor: bool) -> str:
    """The treatment of another check of the same topic, drawn by a hash; never "nothing"."""
    names = sorted({*ADVICE.values()} - {own, "nothing"})
    of_training = {
        "lower rate",
        "z-loss",
        "slow embedding",
        "warm-up",
        "back and skip",
        "back and slower",
        "back and own data",
        "usual eps and scale",
        "own data and scale",
        "back and slow embedding",
        "hold scores",
        "hold maps",
        "usual betas",
        "train all",
        "reset gradients",
        "train all as usual",
        "whole loop as usual",
        "steps as planned",
        "divide gradients",
        "ignore padding",
        "float32",
    }
    chosen = [name for name in names if monitor or name not in of_training]
    return chosen[int(hashlib.sha256(f"placebo:{key}".encode()).hexdigest(), 16) % len(chosen)]
