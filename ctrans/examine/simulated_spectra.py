"""The spectra of `ctrans simulate --spectra`: their measures and their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctrans.measure.forward.spectra import SpectrumFigures
from ctrans.measure.measured import Value
from ctrans.measure.measures import MEASURES, Measure

for _product, _words in (
    ("QK", "Q'K of a head"),
    ("OV", "O V of a head"),
    ("W_2 W_1", "W_2 W_1 of an FFN or expert"),
):
    MEASURES.add(
        "ctrans simulate --spectra",
        {
            f"largest singular value of {_product}": Measure(
                formula=f"sigma_max of {_words}, largest over heads or experts", scope="sublayer"
            ),
            f"largest eigenvalue of {_product}": Measure(
                formula=f"|lambda|_max of {_words}, largest over heads or experts",
                scope="sublayer",
            ),
            f"positive share of {_product}": Measure(
                formula=(
                    "share of the eigenvalues' sizes that those with positive real part have, of"
                    f" {_words}, mean over heads"
                ),
                unit="share",
                scope="sublayer",
                share=True,
                log=False,
            ),
            f"real part of {_product}": Measure(
                formula=f"real parts of the eigenvalues of {_words}",
                unit="real part",
                scope="weight",
                detail=True,
            ),
            f"eigenvalues of {_product}": Measure(
                formula=f"eigenvalues of {_words} in the complex plane, all heads or experts",
                unit="imaginary part",
                scope="weight",
                against=f"real part of {_product}",
            ),
        },
        picture="spectra",
    )


def of_products(model: str, spectra: Sequence[SpectrumFigures]) -> Iterator[Value]:
    """The rows of the spectra."""
    groups: dict[tuple[int, str], list[SpectrumFigures]] = {}
    for spectrum in spectra:
        groups.setdefault((spectrum.segment, spectrum.product), []).append(spectrum)
    for (segment, product), parts in groups.items():
        singular = max(part.singular[0] for part in parts)
        radius = max(part.radius for part in parts)
        positive = sum(part.positive for part in parts) / len(parts)
        yield Value(model, f"largest singular value of {product}", singular, depth=segment)
        yield Value(model, f"largest eigenvalue of {product}", radius, depth=segment)
        yield Value(model, f"positive share of {product}", positive, depth=segment)
    for spectrum in spectra:
        name = f"segment {spectrum.segment}, part {spectrum.part}"
        for real, imaginary in zip(spectrum.real, spectrum.imaginary, strict=True):
            figures = {
                f"real part of {spectrum.product}": real,
                f"eigenvalues of {spectrum.product}": imaginary,
            }
            for measure, figure in figures.items():
                yield Value(
                    model,
                    measure,
                    figure,
                    depth=spectrum.segment,
                    head=spectrum.part,
                    place=name,
                )
