"""The run-time type checker of the tests: beartype, with ints where floats are asked for, as
everywhere in Python.

A machine borrowed for its GPU may lack beartype. All but annotations is tested there.
"""

import functools
import inspect
import random

import jaxtyping

try:
    from beartype import BeartypeConf, beartype
except ImportError:
    beartype = None

_CHECKED = beartype and beartype(conf=BeartypeConf(is_pep484_tower=True))
VALUE = "ret0"
"""The parameter by which jaxtyping hands over what the function returned."""


def allow(checks: bool) -> None:
    """Turns the checks on or off."""
    jaxtyping.config.jaxtyping_disable = not checks


def check(function):
    """The function with its arguments and value checked, which is made at its first call: most are
    never called with checks on.

    jaxtyping asks twice: for the arguments alone, and for both once the function has returned. Only
    the second is answered. So a function may raise an error of its own for an argument, which is
    what a user meets; one that takes it and returns is told.
    """
    if VALUE not in inspect.signature(function).parameters:
        return function
    made = None

    @functools.wraps(function)
    def checked(*arguments, **named):
        nonlocal made
        if made is None:
            made = _CHECKED(function)
        numbers = random.getstate()  # beartype draws the entries of lists that it checks
        try:
            return made(*arguments, **named)
        finally:
            random.setstate(numbers)

    return checked
