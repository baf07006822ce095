"""An agent that dies before or after a call to the API server or a transaction of the lessee.

A kill within a transaction is one before or after it: SQLite sees to that (test_kills.py).
"""

from collections.abc import Callable
from typing import Any

from ipam.leases.block_store import BlockStore
from tests.unit.ipam.leases.nodes import ClusterNode

VERBS = ("identify", "put", "revise", "serve", "begin_return", "forget", "lose")


class Killed(BaseException):
    """The process is gone."""


class Kill:
    """Kills at the `at`-th boundary of a call; counts them all if that is never reached."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.count = 0

    def boundary(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise Killed

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: object, **named: object) -> object:
            self.boundary()
            answer = call(*arguments, **named)
            self.boundary()
            return answer

        return wrapped


def armed(node: ClusterNode, kill: Kill) -> None:
    """Make every boundary of the lessee's calls one where it may die."""
    store = node.lessee._store
    for verb in VERBS:
        setattr(store, verb, kill.around(getattr(BlockStore, verb).__get__(store)))
    node.api._call = kill.around(type(node.api)._call.__get__(node.api))  # type: ignore[method-assign]


def disarmed(node: ClusterNode, boot: str) -> None:
    """A new process, on which nothing dies."""
    del node.api._call
    node.restart(boot)
