"""Large tensors on large memory pages, if the system gives them on request.

A streamed screening makes and frees every block's weights. For Llama-7B these are 35 million pages
of 4 KiB, and the first access to each page is an interrupt. This module imports only the standard
library, because it must run before torch is imported.
"""

from __future__ import annotations

import os

SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"
SWITCH = "THP_MEM_ALLOC_ENABLE"
"""With this variable torch requests huge pages (madvise) for tensors of 2 MiB and more."""


def take_huge_pages(setting: str | os.PathLike[str] = SETTING) -> None:
    """Lets torch request huge pages if Linux gives them on request, unless the user has set
    `SWITCH`.

    Works only before torch is imported.
    """
    try:
        with open(setting, encoding="utf-8") as file:
            on_request = "[madvise]" in file.read()
    except OSError:
        return  # another system, or an unknown setting
    if on_request:
        os.environ.setdefault(SWITCH, "1")
