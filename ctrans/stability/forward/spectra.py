"""Spectra by depth of what a sublayer's matrices make together: Q_h'K_h and O_h V_h of each head,
W_2 W_1 of an FFN or expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.fields import ExposesHeads, ExposesWeights
from ctrans.walk import Instrument, StepContext


@dataclasses.dataclass(frozen=True, eq=False)
class ProductSpectrum:
    """Of the product `name` ("QK", "OV" or "W_2 W_1") of segment `k` and its `part`, the number of
    the head or expert.

    `singular` values from the largest on, and `eigenvalues`, as many as the product's rank can be:
    the others are zero. A score is x_i' Q'K x_j, so that a symmetric part with positive eigenvalues
    has tokens read what is like them; O V is what a head that reads one token adds to the stream.
    """

    k: int
    kind: str
    name: str
    part: int
    singular: Float[Tensor, " rank"]
    eigenvalues: Complex[Tensor, " rank"]


@dataclasses.dataclass(frozen=True)
class SpectrumFigures:
    """A `ProductSpectrum` as lists: real and imaginary parts of eigenvalues, the largest first;
    their largest size, and the share of their sum of sizes that those with positive real part have.
    """

    segment: int
    kind: str
    product: str
    part: int
    singular: list[float]
    real: list[float]
    imaginary: list[float]
    radius: float
    positive: float


def spectrum_figures(spectrum: ProductSpectrum) -> SpectrumFigures:
    """The figures of one."""
    values = spectrum.eigenvalues[spectrum.eigenvalues.abs().argsort(descending=True)]
    sizes = values.abs()
    return SpectrumFigures(
        segment=spectrum.k,
        kind=spectrum.kind,
        product=spectrum.name,
        part=spectrum.part,
        singular=spectrum.singular.tolist(),
        real=values.real.tolist(),
        imaginary=values.imag.tolist(),
        radius=float(sizes[0]),
        positive=float((sizes * (values.real > 0)).sum() / sizes.sum()),
    )


class Spectra(Instrument):
    """Every `ProductSpectrum`, in order. Attention that does not show its heads and maps that do
    not show their matrices have none.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._found: list[ProductSpectrum] = []

    @torch.no_grad()
    def forward(self, at: StepContext) -> None:
        for kind, branch in at.sublayer.branches.items():
            for name, part, left, right in _products(branch.field):
                self._found.append(ProductSpectrum(at.k, kind, name, part, *spectrum_of_product(left, right)))

    def figures(self) -> list[ProductSpectrum]:
        return self._found


def spectrum_of_product(left: Float[Tensor, "rows inner"], right: Float[Tensor, "inner rows"]) -> tuple[Tensor, Tensor]:
    """Singular values and eigenvalues of A B in float64, through matrices no larger than the
    smaller dimension.

    With A = Q_a R_a and B' = Q_b R_b the singular values are those of R_a R_b'; the eigenvalues
    that are not 0 are those of B A.
    """
    a, b = left.double(), right.double()
    if a.shape[1] >= a.shape[0]:
        product = a @ b
        return torch.linalg.svdvals(product), torch.linalg.eigvals(product)
    small = torch.linalg.qr(a, mode="r").R @ torch.linalg.qr(b.T, mode="r").R.T
    return torch.linalg.svdvals(small), torch.linalg.eigvals(b @ a)


def _products(field: object) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    if isinstance(field, ExposesHeads):
        for h, head in enumerate(field.head_matrices()):
            yield "QK", h, head.query.T, head.key
            yield "OV", h, head.out, head.value
    elif isinstance(field, ExposesWeights):
        matrices = list(field.matrices())
        ups, downs = ([each.weight for each in matrices if each.role == role] for role in ("up", "down"))
        for part, (up, down) in enumerate(zip(ups, downs, strict=True)):
            yield "W_2 W_1", part, down, up
