"""Memory of a computation as torch's allocators count it, and what autograd keeps."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that `work` holds at once, above what was there before: from the profiler's
    record of every allocation.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = [
            e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"
        ]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def saved_bytes(forward: Callable[[], object], parameters: list[Tensor]) -> int:
    """What autograd keeps between forward and backward, parameters apart."""
    kept: dict[int, tuple[int, Tensor]] = {}
    own = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(size for size, _ in kept.values())
    del result
    return total
