"""The answers of the tables: ERR(...), OK and OK∅."""

from dataclasses import dataclass
from typing import Protocol

from tests.conformance.node import Outcome


class Expected(Protocol):
    def met_by(self, outcome: Outcome) -> None:
        """Fail the test if the outcome differs."""


@dataclass(frozen=True)
class Err:
    """Exit code 1 and exactly one error document.

    With `message` only, the document has exactly that message; with `details`, exactly both.
    `contains` is a part of the message. Every error document of ours has the protocol's version.
    (M1)
    """

    code: int | tuple[int, ...]
    message: str | None = None
    details: str | None = None
    contains: str | tuple[str, ...] = ()

    def met_by(self, outcome: Outcome) -> None:
        assert outcome.exit_code == 1, outcome
        document = outcome.document
        assert document["cniVersion"]
        codes = (self.code,) if isinstance(self.code, int) else self.code
        assert document["code"] in codes, outcome
        begin = f"[podfabric {document['code']}] "
        assert document["msg"].startswith(begin), outcome
        if self.message is not None:
            assert document["msg"] == begin + self.message
            assert document.get("details") == self.details
        elif self.details is not None:
            assert document.get("details") == self.details
        for part in (self.contains,) if isinstance(self.contains, str) else self.contains:
            assert part in document["msg"]
        assert set(document) <= {"cniVersion", "code", "msg", "details"}


@dataclass(frozen=True)
class Nothing:
    """OK∅: exit code 0 and no output."""

    def met_by(self, outcome: Outcome) -> None:
        assert (outcome.exit_code, outcome.stdout) == (0, b""), outcome


@dataclass(frozen=True)
class Added:
    """The result of an ADD, in the version of the request."""

    version: str = "1.0.0"

    def met_by(self, outcome: Outcome) -> None:
        assert outcome.exit_code == 0, outcome
        document = outcome.document
        assert document["cniVersion"] == self.version
        assert ("ip4" in document) is (self.version in ("0.1.0", "0.2.0"))


@dataclass(frozen=True)
class NotCode:
    """Success, or an error with another code than this."""

    code: int

    def met_by(self, outcome: Outcome) -> None:
        if outcome.exit_code != 0:
            assert outcome.document["code"] != self.code, outcome


OK = Nothing()
ADDED = Added()
