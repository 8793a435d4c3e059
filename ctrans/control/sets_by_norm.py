"""The set of velocities behind a norm, by the kind of its image."""

from __future__ import annotations

from collections.abc import Callable

from ctrans.control.ellipsoids import Ellipsoid, EllipsoidProduct, EllipsoidSlice
from ctrans.control.norm_image import Ball, Box, NormImage
from ctrans.dynamics.norm import Norm
from solvers import look_up

IMAGES: dict[str, Callable[..., NormImage]] = {
    "ellipsoid": Ellipsoid,
    "slice": EllipsoidSlice,
    "ellipsoids": EllipsoidProduct,
    "box": Box,
    "ball": Ball,
}
"""By `Norm.image`. A new kind of set is one entry; the Hamiltonian behind such a norm follows from
it.
"""


def image_of(norm: Norm) -> NormImage:
    """The closure of the norm's image, for eps = 0."""
    return look_up("image", norm.image, IMAGES)(norm)


def reachable(norm: Norm) -> NormImage:
    """The closure of the norm's image at its own eps: with the inside if the norm reaches it. Only
    a running cost uses the inside.
    """
    image = image_of(norm)
    if norm.reaches_inside:
        return image.hull
    return image
