"""The interface of a plugin: five verbs over typed requests. VERSION needs no plugin."""

from collections.abc import Sequence
from typing import Any, Protocol

from cni.spec.request import Request
from cni.spec.result import Result


class Plugin(Protocol):
    """One CNI plugin. Every verb raises only CNIError."""

    @property
    def versions(self) -> Sequence[str]:
        """The supported protocol versions."""

    def add(self, request: Request) -> Result | dict[str, Any]:
        """Attach. Returns the result, or the result's JSON document in the requested version."""

    def delete(self, request: Request) -> None:
        """Detach, also if parts of the attachment are gone already."""

    def check(self, request: Request) -> None:
        """Raise CNIError 102 if the attachment differs from the result of `add`."""

    def gc(self, request: Request) -> None:
        """Remove the attachments of this network that the runtime does not list as valid."""

    def status(self, request: Request) -> None:
        """Raise CNIError 50 or 51 if an `add` would fail now."""
