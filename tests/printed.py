"""What a plugin prints."""

import json
from typing import Any


class Printed:
    """Has the standard output of a plugin."""

    stdout: bytes | str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, which must be exactly one JSON object."""
        document = json.loads(self.stdout)
        assert isinstance(document, dict)
        return document
