"""Code before or behind the sublayers of a model that ctrans did not write.

A verdict is about the sublayers. Nobody knows whether H is finite in a sublayer that stands in the
code of a subclass, a plugin or a hook, so the model's verdict is at best open.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize

from ctrans.measure.walk import Model

BEFORE = "the part before its blocks"
BEHIND = "the part behind its blocks"
WAY = "a way past the states"
OF_ITS_OWN = "may be a sublayer: ctrans did not write it and does not examine it"
METHODS = {"embed": BEFORE, "head": BEHIND, "head_weight": BEHIND, "forward": BEHIND}
"""The methods of a model of ctrans that compute what is outside of its sublayers, and where."""
PARTS = {"token_embedding": BEFORE, "position_embedding": BEFORE}
"""The parts before the sublayers; others, such as the last norm, are behind them."""


def outer_code(model: Model) -> dict[str, str]:
    """Each part outside of the sublayers of a model of ctrans with code that is not ctrans' own,
    and what that means. Nothing is said of a class that shares no code with those of ctrans: its
    author says what is its head.
    """
    if not isinstance(model, nn.Module):
        return {}
    return dict(_changed_methods(model)) | dict(_changed_parts(model))


def _changed_methods(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, where in METHODS.items():
        owners = [each for each in type(model).__mro__ if name in vars(each)]
        if not any(owner.__module__.startswith("ctrans.") for owner in owners):
            continue
        is_replaced = name in vars(model)
        if is_replaced or not owners[0].__module__.startswith("ctrans."):
            yield where, f"{type(model).__name__}.{name} {OF_ITS_OWN}"


def _changed_parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    if not any(base.__module__.startswith("ctrans.") for base in type(model).__mro__):
        return
    if model._forward_hooks or model._forward_pre_hooks:
        yield BEHIND, f"a hook of {type(model).__name__} {OF_ITS_OWN}"
    for name, child in model.named_children():
        if name == "depth":
            if _is_changed(child):
                yield BEHIND, f"{name} ({type(child).__name__}) {OF_ITS_OWN}"
            continue
        for path, part in child.named_modules(prefix=name):
            if _is_changed(part):
                yield PARTS.get(name, BEHIND), f"{path} ({type(part).__name__}) {OF_ITS_OWN}"


def _is_changed(part: nn.Module) -> bool:
    """Whether a part may compute something else than its class of ctrans or torch says, or is a
    class with sublayers, such as torch's encoder.
    """
    module = type(part).__module__
    is_known = module.startswith(("ctrans.", "torch.nn.modules.")) and "transformer" not in module
    hooks = part._forward_hooks or part._forward_pre_hooks
    return bool(
        not is_known or hooks or "forward" in vars(part) or parametrize.is_parametrized(part)
    )
