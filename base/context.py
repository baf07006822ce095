"""Gives a context variable a value for a block.

A generator (contextlib) would cost three times as much, and each call of an agent sets three.
"""

from contextvars import ContextVar, Token
from typing import Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")


class Bound(Generic[V, T]):
    """`with` gives the variable the value, which it answers, and takes it away at the end."""

    def __init__(self, variable: ContextVar[V | T], value: T) -> None:
        self._variable = variable
        self._value = value
        self._token: Token[V | T] | None = None

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._value

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            self._variable.reset(self._token)
