"""Protocols that ask the instance for its members."""

from __future__ import annotations

from typing import Any, Protocol

from typing_extensions import get_protocol_members


class AsksTheInstance(type(Protocol)):  # type: ignore[misc]  # typing's own metaclass of protocols
    """`isinstance` asks the instance itself for each member of the protocol. Python's rule asks the
    class, where a property counts even if it raises AttributeError, as those of `ParallelMaps` do.
    From Python 3.12 on it does not see parameters and modules of an `nn.Module` either.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        if Protocol not in cls.__bases__:  # a class that names the protocol as its base
            return bool(super().__instancecheck__(instance))
        return all(hasattr(instance, name) for name in get_protocol_members(cls))
