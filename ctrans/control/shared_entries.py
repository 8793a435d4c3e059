"""Matrices whose entries share memory, so that none of them can change alone."""

from __future__ import annotations

from ctrans.dynamics.depth import Depth


def shared_inside(depth: Depth) -> str:
    """Names a matrix whose entries share memory, as after `expand`; "" for none. Such entries
    cannot change alone.
    """
    for k, sublayer in enumerate(depth.sublayers):
        for name, weight in sublayer.field.named_parameters():
            axes = zip(weight.stride(), weight.shape, strict=True)
            if any(stride == 0 and size > 1 for stride, size in axes):
                return (
                    f"the entries of {name} of segment {k} share memory, as after expand(): give it"
                    " its own, parameter.data = parameter.data.clone()"
                )
    return ""
