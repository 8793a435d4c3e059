"""Other people's models in and out: blocks of theirs as ODEs, nanoGPT checkpoints, Hugging Face models as a `Depth`."""

from ctrans.interop.anatomy import Anatomy
from ctrans.interop.continuous import continuize, discretize
from ctrans.interop.imported import Architecture, Imported
from ctrans.interop.local import from_transformers
from ctrans.interop.nanogpt import from_nanogpt, to_nanogpt

__all__ = [
    "Anatomy",
    "Architecture",
    "Imported",
    "continuize",
    "discretize",
    "from_nanogpt",
    "from_transformers",
    "to_nanogpt",
]
