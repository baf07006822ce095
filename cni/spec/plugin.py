"""What a plugin is: five verbs over typed requests. VERSION needs no plugin."""

from collections.abc import Sequence
from typing import Any, Protocol

from cni.spec.request import Request
from cni.spec.result import Result


class Plugin(Protocol):
    """One CNI plugin. Every verb raises only CNIError."""

    @property
    def versions(self) -> Sequence[str]:
        """The protocol versions the plugin speaks."""

    def add(self, request: Request) -> Result | dict[str, Any]:
        """Attach. Returns the result, or a whole document in the requested version."""

    def delete(self, request: Request) -> None:
        """Detach, also if all or part of the attachment is gone already."""

    def check(self, request: Request) -> None:
        """Compare the attachment with what `add` made."""

    def gc(self, request: Request) -> None:
        """Remove the attachments of this network that the runtime does not list as valid."""

    def status(self, request: Request) -> None:
        """CNIError 50 or 51 if an `add` could not succeed now."""
