"""The library `transformers`: imported when it is needed, without output, and with its errors in
one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ctrans.base.printable import one_line
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from solvers import ConfigError


def import_transformers() -> Any:
    """The library. Raises ConfigError, saying how to install it, if it is missing."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "Hugging Face models need the library transformers: pip install 'ctrans[hf]'"
        ) from None
    return transformers


@contextmanager
def reading(failure: str) -> Iterator[None]:
    """Inside, errors of foreign code, for a config, weights or an input, become one ConfigError
    that begins with `failure`.
    """
    try:
        yield
    except ConfigError:
        raise
    except FOREIGN_ERRORS as error:
        text = one_line(error)
        if isinstance(error, KeyError):
            text = f"its config names {text}, which the library does not know"
        raise ConfigError(f"{failure}: {text}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, the library prints no warnings and no progress bars. Errors as
    `import_transformers`.
    """
    log = import_transformers().utils.logging
    level = log.get_verbosity()
    bars = log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)  # an error that matters is raised too
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
