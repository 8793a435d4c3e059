"""A model and its port, which has two differences: weights in bfloat16, which is rounding, and in
one block a matrix that was not transposed when it was read, which is a fault. It saves both.

    python examples/port.py out/ported
    ctrans compare out/ported/model out/ported/port --dtype float32
"""

import copy
import sys
from pathlib import Path

import torch

import ctrans

ATTENTION = 8
"""The sublayer with the fault: the attention of block 4."""


def main(place: Path) -> ctrans.GPT:
    config = ctrans.GPTConfig(
        depth=8, width=64, heads=4, context=64, placement="pre", initialisation="xavier"
    )
    model = ctrans.GPT(config, seed=0)
    port = copy.deepcopy(model)
    with torch.no_grad():
        for weight in port.parameters():
            weight.copy_(weight.bfloat16().float())
        matrix = port.depth.sublayers[ATTENTION].field.output_projection.weight
        matrix.copy_(matrix.t().clone())
    ctrans.save(model, place / "model")
    ctrans.save(port, place / "port")
    return port


if __name__ == "__main__":
    main(Path(sys.argv[1]))
