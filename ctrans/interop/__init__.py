"""Models of other libraries: Hugging Face models and nanoGPT checkpoints in and out, any module as
a `Depth`, blocks as ODEs.
"""

from ctrans.interop.anatomy import Anatomy
from ctrans.interop.architecture import PRESETS, from_architecture
from ctrans.interop.continuous import continuize, discretize
from ctrans.interop.hugging_face import from_transformers
from ctrans.interop.imported import Architecture, Imported
from ctrans.interop.nanogpt import from_nanogpt, to_nanogpt
from ctrans.interop.open_model import open_model
from ctrans.interop.opened import Opened
from ctrans.interop.ot_transformer import OTTransformer
from ctrans.interop.to_transformers import to_gpt, to_transformers, write_transformers
from solvers import checked

__all__ = [
    "PRESETS",
    "Anatomy",
    "Architecture",
    "Imported",
    "OTTransformer",
    "Opened",
    "continuize",
    "discretize",
    "from_architecture",
    "from_nanogpt",
    "from_transformers",
    "open_model",
    "to_gpt",
    "to_nanogpt",
    "to_transformers",
    "write_transformers",
]

for _function in (
    continuize,
    discretize,
    from_architecture,
    from_nanogpt,
    from_transformers,
    open_model,
    to_gpt,
    to_nanogpt,
    to_transformers,
    write_transformers,
):  # checked where a user calls, and nowhere inside
    globals()[_function.__name__] = checked(_function, face=__name__)
