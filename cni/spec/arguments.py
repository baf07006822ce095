"""CNI_ARGS: `KEY=VALUE;KEY=VALUE`, with the reference's rules (pkg/types/args.go).

Keys are case-sensitive. A key that the plugin does not know is an error unless IgnoreUnknown
is true, wherever in the list it stands.
"""

from collections.abc import Collection, Mapping

from base.pod import Pod
from cni.spec.errors import CNIError, Code
from cni.spec.limits import MAX_ARGS

POD_KEYS = frozenset(
    ("K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID")
)


def parse(args: str, known: Collection[str] = ()) -> dict[str, str]:
    """The pairs of `args` whose key is in `known` or is one of the Kubernetes runtimes' keys.

    Raises CNIError 4 for a broken pair, a value of IgnoreUnknown that is no boolean, unknown
    keys without IgnoreUnknown, and too long a text.
    """
    if args == "":
        return {}
    if len(args) > MAX_ARGS:
        raise CNIError(
            Code.INVALID_ENVIRONMENT,
            f"ARGS: {len(args)} characters, at most {MAX_ARGS} are allowed: shorten CNI_ARGS",
        )
    pairs: dict[str, str] = {}
    unknown = []
    ignore_unknown = False
    for pair in args.split(";"):
        key, separator, value = pair.partition("=")
        if not separator or "=" in value:
            raise CNIError(Code.INVALID_ENVIRONMENT, f'ARGS: invalid pair "{pair}"')
        if key == "IgnoreUnknown":
            ignore_unknown = _boolean(value)
        elif key in known or key in POD_KEYS:
            pairs[key] = value
        else:
            unknown.append(pair)
    if unknown and not ignore_unknown:
        listed = " ".join(f'"{pair}"' for pair in unknown)
        raise CNIError(Code.INVALID_ENVIRONMENT, f"ARGS: unknown args [{listed}]")
    return pairs


def pod_of(pairs: Mapping[str, str]) -> Pod:
    """The pod that CNI_ARGS name."""
    return Pod(
        namespace=pairs.get("K8S_POD_NAMESPACE", ""),
        name=pairs.get("K8S_POD_NAME", ""),
        uid=pairs.get("K8S_POD_UID", ""),
    )


def _boolean(value: str) -> bool:
    if value == "1" or value.lower() == "true":
        return True
    if value == "0" or value.lower() == "false":
        return False
    raise CNIError(
        Code.INVALID_ENVIRONMENT, f"ARGS: boolean unmarshal error: invalid input {value}"
    )
