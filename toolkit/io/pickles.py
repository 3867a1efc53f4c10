"""Restricted unpickling for tensor files: neither code execution nor unbounded time."""

from __future__ import annotations

import pickle
from typing import Any

_Unpickler: Any = pickle._Unpickler
"""The pure-Python unpickler. The C version hashes any dict key, which can take exponential time for nested
tuples, and allocates as many objects as the file requests."""
_OPERATIONS = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE
    SHORT_BINUNICODE EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM
    SETITEMS MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD
    BINPERSID"""


class PlainUnpickler(_Unpickler):
    """Reads a pickle whose dicts have only plain keys (:meth:`is_plain`).

    Raises:
        pickle.UnpicklingError: it has other keys.
        KeyError: it has an opcode that tensors do not need.
    """

    dispatch = {
        code: _Unpickler.dispatch[code]
        for code in (getattr(pickle, operation)[0] for operation in _OPERATIONS.split())
    }

    def is_plain(self, key: Any) -> bool:
        return type(key) in (str, int)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], [key], [value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(self.stack[-1], items[::2], items[1::2])

    def _set(self, target: Any, keys: list[Any], values: list[Any]) -> None:
        if not all(map(self.is_plain, keys)):
            raise pickle.UnpicklingError("it has keys that are not names")
        for key, value in zip(keys, values, strict=True):
            target[key] = value

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


class _Placeholder:
    """Placeholder for any object in a pickle."""

    def __new__(cls, *_: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class PickleCheck(PlainUnpickler):
    """Checks the keys in a pickle without building its objects, before another reader loads it."""

    def find_class(self, module: str, name: str) -> Any:
        return _Placeholder

    def persistent_load(self, place: Any) -> Any:
        return _Placeholder()
