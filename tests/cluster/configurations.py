"""Network configurations that several tests use."""

from typing import Any


def ipoib(subnet: str, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - any option
    """A configuration of the plugin `ipoib` with addresses of `subnet`, on the pod's HCA."""
    ipam = {"type": "podfabric-ipam", "range": subnet}
    return {"type": "ipoib", "master": "auto", "ipam": ipam, **options}
