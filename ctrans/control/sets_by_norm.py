"""The set of velocities behind a norm, by what kind of set its image is."""

from __future__ import annotations

from collections.abc import Callable

from ctrans.control.admissible import VelocitySet
from ctrans.control.ball import Ball
from ctrans.control.box import Box
from ctrans.control.ellipsoid import Ellipsoid, EllipsoidProduct, EllipsoidSlice, FilledImage, SphereImage
from ctrans.control.norm_image import NormImage
from ctrans.norm import Norm
from solvers.errors import look_up

IMAGES: dict[str, Callable[..., NormImage]] = {
    "ellipsoid": Ellipsoid,
    "slice": EllipsoidSlice,
    "ellipsoids": EllipsoidProduct,
    "box": Box,
    "ball": Ball,
}
"""By `Norm.image`: a new kind of set is one entry, and the Hamiltonian behind such a norm follows from it."""


def image_of(norm: Norm) -> NormImage:
    """The closure of the norm's image, for eps = 0."""
    return look_up("image", norm.image, IMAGES)(norm)


def reachable(norm: Norm) -> VelocitySet:
    """The same with its inside where the norm reaches that, which only a running cost can make worth while."""
    image = image_of(norm)
    if not norm.reaches_inside:
        return image
    if isinstance(image, EllipsoidProduct):
        return EllipsoidProduct(image.norm, inner=True)
    return FilledImage(image) if isinstance(image, SphereImage) else image
