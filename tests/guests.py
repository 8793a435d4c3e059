"""What a measurement must leave as it was, and the assertion that it does. It imports nothing of
ctrans, whose decorator it extends before the rooms use it.
"""

import contextlib
import functools
import inspect
import os
import random
import threading

import numpy as np
import torch


def _bits(tensor):
    """The entries of a tensor, bit for bit. A large one stands for itself by its version."""
    if tensor is None or tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return None
    if tensor.numel() > 1e6 or tensor.is_inference():
        return tensor.data_ptr()
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _members(module):
    """What a module holds, by name: its attributes, and the entries of those that are dicts (hooks
    too) or lists.
    """
    for name, value in vars(module).items():
        yield name, id(value)
        entries = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        yield from (((name, key), id(entry)) for key, entry in entries)


def state_of_process():
    """What belongs to no module: random numbers, torch's modes and settings, and the
    environment.
    """
    return {
        "torch's random numbers": _bits(torch.get_rng_state()),
        "python's random numbers": random.getstate(),
        "numpy's random numbers": repr(np.random.get_state()),
        "default dtype": torch.get_default_dtype(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "kernels": (
            torch.backends.mha.get_fastpath_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
        ),
        "attention kernels": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        # torch sets this one when its compiler is first imported
        "environment": {
            name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"
        },
    }


def state_of(model):
    """All that a measurement of a model must leave: each name with a value that can be compared."""
    found, alive = state_of_process(), []
    modules = (
        dict(model.named_modules(remove_duplicate=False))
        if isinstance(model, torch.nn.Module)
        else {}
    )
    for path, module in modules.items():
        alive.extend(
            value
            for each in (vars(module), *vars(module).values())
            if isinstance(each, dict)
            for value in each.values()
        )
        found[path, "members"] = dict(_members(module))
        found[path, "mode"], found[path, "class"] = module.training, type(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[path, name] = (
                    tensor.requires_grad,
                    tensor.dtype,
                    tensor.device,
                    _bits(tensor),
                )
                found[path, name, "version"] = (
                    tensor._version if name in module._parameters else None
                )
                found[path, name, "grad"] = (
                    (id(tensor.grad), _bits(tensor.grad)) if tensor.is_leaf else None
                )
                found[path, name, "hooks"] = [
                    *(tensor._backward_hooks or ()),
                    *(tensor._post_accumulate_grad_hooks or ()),
                ]
    return found, alive  # what is compared by its id must live


def traces_in(model):
    """What a monitor may leave behind in a model that trained on: modes, `requires_grad`, names of
    attributes, hooks, and numbers.
    """
    found = {"torch": _bits(torch.get_rng_state())}
    for path, module in model.named_modules():
        hooks = {
            name: len(value) for name, value in vars(module).items() if name.endswith("_hooks")
        }
        asking = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        found[path] = (type(module), module.training, sorted(vars(module)), hooks, asking)
    return found


@contextlib.contextmanager
def left_as_found(model):
    """Asserts at the end, also after an exception, that nothing about the model or the process has
    changed.
    """
    before, alive = state_of(model)
    try:
        yield
    finally:
        after, _ = state_of(model)
        changed = [
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        ]
        assert not changed, f"changed by a measurement: {sorted(map(str, changed))}"
        del alive


def checking_as_found(leaving_as_found, held):
    """The decorator of ctrans, whose functions then assert in every test that they leave their
    model as they found it.
    """

    def decorator(function):
        first, measuring = (
            next(iter(inspect.signature(function).parameters)),
            leaving_as_found(function),
        )

        @functools.wraps(measuring)
        def checked(*args, **kwargs):
            # a measurement around this one restores everything at its end, one in another thread at
            # its own
            if held or threading.current_thread() is not threading.main_thread():
                return measuring(*args, **kwargs)
            with left_as_found(args[0] if args else kwargs.get(first)):
                return measuring(*args, **kwargs)

        return checked

    return decorator
