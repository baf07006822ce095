"""The standard output of a plugin."""

import json
from typing import Any


class Printed:
    """A mixin for results that have a plugin's standard output."""

    stdout: bytes | str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, which must be exactly one JSON object."""
        document = json.loads(self.stdout)
        assert isinstance(document, dict)
        return document
