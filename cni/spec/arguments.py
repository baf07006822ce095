"""CNI_ARGS: `KEY=VALUE;KEY=VALUE`, with the reference's rules (pkg/types/args.go).

Keys are case-sensitive. An unknown key is an error unless IgnoreUnknown is true, which may stand
anywhere in the list.
"""

import msgspec

from base.pod import Pod
from cni.spec.errors import CNIError, Code
from cni.spec.limits import MAX_ARGS


class Arguments(msgspec.Struct, frozen=True):
    """CNI_ARGS as typed values; "" is missing. `ip` and `gateway` may be lists with commas."""

    pod: Pod = Pod()
    ip: str = ""
    gateway: str = ""
    mac: str = ""


_KEYS = frozenset(
    (
        *("IP", "GATEWAY", "MAC"),
        *("K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID"),
    )
)


def parse(args: str) -> Arguments:
    """The value of CNI_ARGS.

    Raises CNIError 4 for a broken pair, a value of IgnoreUnknown that is not a boolean, unknown
    keys without IgnoreUnknown, and a text that is too long.
    """
    if args == "":
        return Arguments()
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
        elif key in _KEYS:
            pairs[key] = value
        else:
            unknown.append(pair)
    if unknown and not ignore_unknown:
        listed = " ".join(f'"{pair}"' for pair in unknown)
        raise CNIError(Code.INVALID_ENVIRONMENT, f"ARGS: unknown args [{listed}]")
    return Arguments(
        pod=Pod(
            namespace=pairs.get("K8S_POD_NAMESPACE", ""),
            name=pairs.get("K8S_POD_NAME", ""),
            uid=pairs.get("K8S_POD_UID", ""),
        ),
        ip=pairs.get("IP", ""),
        gateway=pairs.get("GATEWAY", ""),
        mac=pairs.get("MAC", ""),
    )


def _boolean(value: str) -> bool:
    if value == "1" or value.lower() == "true":
        return True
    if value == "0" or value.lower() == "false":
        return False
    raise CNIError(
        Code.INVALID_ENVIRONMENT, f"ARGS: boolean unmarshal error: invalid input {value}"
    )
