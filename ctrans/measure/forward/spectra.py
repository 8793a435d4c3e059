"""Spectra by depth of products of a sublayer's matrices: Q_h'K_h and O_h V_h of each head, W_2 W_1
of an FFN or expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import ExposesHeads, ExposesWeights
from ctrans.measure.walk import Instrument, StepContext


@dataclasses.dataclass(frozen=True)
class SpectrumFigures:
    """The spectrum of a `product` ("QK", "OV" or "W_2 W_1"); `part` is the number of the head or
    expert. Both lists have as many values as the largest possible rank; the others are zero.

    - `singular`: the singular values, largest first
    - `real`, `imaginary`: the parts of the eigenvalues, largest modulus first
    - `radius`: their largest modulus
    - `positive`: the share of the sum of moduli with positive real part

    A score is x_i' Q'K x_j, so with a symmetric part of positive eigenvalues tokens read similar
    tokens. O V maps a token to what a head that reads it alone adds to the stream.
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


class Spectra(Instrument):
    """`SpectrumFigures` of all products in order. Maps that expose neither heads nor matrices have
    none.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self.found: list[SpectrumFigures] = []

    @torch.no_grad()
    def forward(self, at: StepContext) -> None:
        for kind, branch in at.sublayer.branches.items():
            for name, part, first, second in _products(branch.field):
                singular, eigenvalues = spectrum_of_product(first, second)
                values = eigenvalues[eigenvalues.abs().argsort(descending=True)]
                sizes = values.abs()
                positive = float((sizes * (values.real > 0)).sum() / sizes.sum())
                self.found.append(
                    SpectrumFigures(
                        at.k,
                        kind,
                        name,
                        part,
                        singular.tolist(),
                        values.real.tolist(),
                        values.imag.tolist(),
                        float(sizes[0]),
                        positive,
                    )
                )


def spectrum_of_product(
    first: Float[Tensor, "rows inner"], second: Float[Tensor, "inner rows"]
) -> tuple[Tensor, Tensor]:
    """Singular values and eigenvalues of A B in float64, from matrices of the smaller dimension.

    With A = Q_a R_a and B' = Q_b R_b, A B has the singular values of R_a R_b' and the nonzero
    eigenvalues of B A.
    """
    a = first.double()
    b = second.double()
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
        ups = [matrix.weight for matrix in matrices if matrix.role == "up"]
        downs = [matrix.weight for matrix in matrices if matrix.role == "down"]
        for part, (up, down) in enumerate(zip(ups, downs, strict=True)):
            yield "W_2 W_1", part, down, up
