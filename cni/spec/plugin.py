"""What a plugin is: five verbs over typed requests. VERSION is answered without one."""

from collections.abc import Sequence
from typing import Any, Protocol

from cni.spec.request import Request
from cni.spec.result import Result


class Plugin(Protocol):
    """One CNI plugin. Every verb raises CNIError and nothing else on purpose."""

    @property
    def versions(self) -> Sequence[str]:
        """The protocol versions the plugin speaks."""

    def add(self, request: Request) -> Result | dict[str, Any]:
        """Attach. Answers the result, or a whole document that already is in the version asked."""

    def delete(self, request: Request) -> None:
        """Detach; also when all or part of the attachment is gone already."""

    def check(self, request: Request) -> None:
        """Compare the attachment with what `add` made of it."""

    def gc(self, request: Request) -> None:
        """Remove the attachments of this network that the runtime does not list."""

    def status(self, request: Request) -> None:
        """Say whether an `add` could succeed now: CNIError 50 or 51 if not."""
