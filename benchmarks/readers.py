"""How much of a model is read by its operations: the models of `examples/any_model.py`, those of
`tests/interop/test_strangers.py` and each family of Hugging Face, these by the usual names of their
parts too.

    python benchmarks/readers.py > benchmarks/results/readers-DATE.txt

A row says how many parts are read (states, placement and norms), how many attentions show their
rows, how many their matrices too (heads), how many FFNs their matrices and activation (units), and
the seconds that opening took.
"""

import sys
import time
import warnings
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()
warnings.simplefilter("ignore")

import torch

from ctrans.base.as_found import as_found
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.imported import Imported
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.interop.transformers_adapter import TransformersAdapter
from examples import any_model
from solvers import ConfigError
from tests.interop import test_all_families, test_strangers


def models():
    """Set, name, model and example of each."""
    for name, (make, inputs, _) in any_model.MODELS.items():
        torch.manual_seed(0)
        given = any_model.TOKENS if inputs is None else inputs()
        yield "examples", name, make(), given[0] if isinstance(given, tuple) else given
    for name, (make, example, _) in test_strangers.STRANGERS.items():
        torch.manual_seed(0)
        yield "strangers", name, make(), example()[0]
    for name in test_all_families.SUPPORTED:
        model = test_all_families.made(name)
        yield "families", name, model, test_all_families.batch(model)


def by_names(kind, model, example):
    if kind != "families":
        raise ConfigError("only models of transformers are read by names")
    return Imported(model, adapter=TransformersAdapter(model, Anatomy()))


def by_operations(kind, model, example):
    return Imported(model, adapter=StreamAdapter(model, Anatomy(), example))


def row(read, kind, model, example):
    """Parts that are read, attentions with rows and with heads, FFNs with units; and the seconds."""
    started = time.perf_counter()
    try:
        with as_found(model):
            imported = read(kind, model, example)
    except FOREIGN_ERRORS:
        return (0, 0, 0, 0), time.perf_counter() - started
    sublayers = imported.depth.sublayers
    fields = [branch.field for part in sublayers for branch in part.branches.values()]
    counts = (
        sum(part.kind != "part" for part in sublayers),
        sum(hasattr(field, "probabilities") for field in fields),
        sum(hasattr(field, "head_matrices") for field in fields),
        sum(hasattr(field, "units") for field in fields),
    )
    return counts, time.perf_counter() - started


def main():
    totals = {}
    print(f"{'':44}{'by names':>28}{'by operations':>28}")
    print(f"{'':44}{'parts  rows heads units  s':>28}{'parts  rows heads units  s':>28}")
    for kind, name, model, example in models():
        model.eval()
        cells = ""
        for reader, read in (("names", by_names), ("operations", by_operations)):
            counts, seconds = row(read, kind, model, example)
            cells += "{:7}{:6}{:6}{:6}".format(*counts) + f"{seconds:5.1f}"
            total = totals.setdefault((kind, reader), [0, 0, 0, 0, 0, 0.0])
            for i, count in enumerate((1, *counts)):
                total[i] += count if i else bool(counts[0])
            total[-1] += seconds
        print(f"{kind:10} {name:32.32} {cells}", flush=True)
    print("\nset         reader       models  parts   rows  heads  units  seconds")
    for (kind, reader), total in totals.items():
        print(f"{kind:11} {reader:11}" + "{:8}{:7}{:7}{:7}{:7}{:9.1f}".format(*total))


if __name__ == "__main__":
    main()
