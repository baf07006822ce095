"""Checks the version of a configuration, like the reference (pkg/version, pkg/skel).

The plugin must support the version. A verb needs the version that introduced it, or a later one.
"""

from collections.abc import Sequence

from cni.spec.errors import CNIError, Code

Parts = tuple[int, int, int]

FIRST_VERSION_WITH = {"CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}


def parse(version: str) -> Parts:
    """The integers of a version such as 1.0.0; "" is 0.1.0. Raises CNIError 6 for another form."""
    if version == "":
        return (0, 1, 0)
    parts = version.split(".")
    if len(parts) > 3:
        raise CNIError(Code.DECODING_FAILURE, f'invalid version "{version}": too many parts')
    numbers = []
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) < 10):
            raise CNIError(
                Code.DECODING_FAILURE, f'invalid version "{version}": "{part}" is not a number'
            )
        numbers.append(int(part))
    major, minor, micro = [*numbers, 0, 0][:3]
    return major, minor, micro


def at_least(version: str, other: str) -> bool:
    return parse(version) >= parse(other)


def require_supported(version: str, supported: Sequence[str]) -> None:
    """Raise CNIError 1 unless the plugin supports the configuration's version."""
    if version not in supported:
        listed = " ".join(f'"{name}"' for name in supported)
        raise CNIError(
            Code.INCOMPATIBLE_VERSION,
            "incompatible CNI versions",
            f'config is "{version}", plugin supports [{listed}]',
        )


def require_verb(command: str, version: str, supported: Sequence[str]) -> None:
    """Raise CNIError 1 if the configuration or the plugin is too old for the verb."""
    first = FIRST_VERSION_WITH.get(command)
    if first is None:
        return
    if not at_least(version, first):
        raise CNIError(Code.INCOMPATIBLE_VERSION, f"config version does not allow {command}")
    if not any(at_least(ours, version) for ours in supported):
        raise CNIError(Code.INCOMPATIBLE_VERSION, f"plugin version does not allow {command}")
