"""Large tensors on large pages, where the system gives them to who asks.

A streamed screening makes every block's weights and frees them: of Llama-7B 35 million pages of 4
KiB, whose first touch is an interrupt each. Imports nothing but the standard library, since it has
to act before torch is imported.
"""

from __future__ import annotations

import os
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SWITCH = "THP_MEM_ALLOC_ENABLE"
"""Torch then asks the system for huge pages (madvise) for tensors of 2 MiB and more."""


def take_huge_pages(setting: Path = SETTING) -> None:
    """Lets torch ask for huge pages where Linux gives them on request, unless the user has set
    `SWITCH`.

    Only acts before torch is imported.
    """
    try:
        on_request = "[madvise]" in setting.read_text()
    except OSError:
        return  # another system, or one that does not say
    if on_request:
        os.environ.setdefault(SWITCH, "1")
