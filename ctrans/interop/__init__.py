"""Models of other libraries: Hugging Face models and nanoGPT checkpoints in and out, any module as
a `Depth`, blocks as ODEs.

Most names import their module when they are first used: a run of ctrans' own GPT needs none.
"""

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from ctrans.interop.open_model import open_model  # not later: it has the name of its module
from solvers import checked

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from ctrans.interop.anatomy import Anatomy
    from ctrans.interop.architecture import from_architecture
    from ctrans.interop.continuous import continuize, discretize
    from ctrans.interop.found_architecture import Architecture
    from ctrans.interop.hugging_face import from_transformers
    from ctrans.interop.imported import Imported
    from ctrans.interop.losses import AnyModel, ModelWithLoss
    from ctrans.interop.nanogpt import from_nanogpt, to_nanogpt
    from ctrans.interop.opened import Opened
    from ctrans.interop.ot_transformer import OTTransformer
    from ctrans.interop.presets import PRESETS
    from ctrans.interop.transformers_export import to_gpt, to_transformers, write_transformers

__all__ = [
    "PRESETS",
    "Anatomy",
    "AnyModel",
    "Architecture",
    "Imported",
    "ModelWithLoss",
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
_HOMES = {
    "PRESETS": "ctrans.interop.presets",
    "Anatomy": "ctrans.interop.anatomy",
    "AnyModel": "ctrans.interop.losses",
    "Architecture": "ctrans.interop.found_architecture",
    "Imported": "ctrans.interop.imported",
    "ModelWithLoss": "ctrans.interop.losses",
    "OTTransformer": "ctrans.interop.ot_transformer",
    "Opened": "ctrans.interop.opened",
    "continuize": "ctrans.interop.continuous",
    "discretize": "ctrans.interop.continuous",
    "from_architecture": "ctrans.interop.architecture",
    "from_nanogpt": "ctrans.interop.nanogpt",
    "from_transformers": "ctrans.interop.hugging_face",
    "to_gpt": "ctrans.interop.transformers_export",
    "to_nanogpt": "ctrans.interop.nanogpt",
    "to_transformers": "ctrans.interop.transformers_export",
    "write_transformers": "ctrans.interop.transformers_export",
}
"""The module of each name that is imported when it is first used."""


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        if inspect.isfunction(value):  # checked where a user calls, and nowhere inside
            value = checked(value, face=__name__)
        globals()[name] = value
        return value

    open_model = checked(open_model, face=__name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
