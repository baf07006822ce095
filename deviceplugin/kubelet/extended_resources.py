"""The kubelet's rules for extended resources: valid names, and the maximum number of ids."""

import re

ID_BYTES = 70  # most bytes of a device in a ListAndWatch answer
LIST_BYTES = 3_670_016  # 3.5 MiB, because gRPC accepts at most 4 MiB
MOST_IDS = LIST_BYTES // ID_BYTES
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_QUOTA = "requests."  # a ResourceQuota has it before the name, and both must be valid


def resource_problem(resource: str) -> str | None:
    """The reason why the kubelet refuses the name of an extended resource; `None` if it is valid.

    Source: IsExtendedResourceName and IsQualifiedName of Kubernetes.
    """
    prefix, slash, name = resource.partition("/")
    if not slash or "/" in name:
        return 'write domain/name, such as "rdma/hca"'
    if "kubernetes.io/" in resource:
        return "names in kubernetes.io are reserved for Kubernetes: use another domain"
    if resource.startswith(_QUOTA):
        return f'names that begin with "{_QUOTA}" are reserved for quotas: use another domain'
    if not _SUBDOMAIN.fullmatch(prefix) or len(_QUOTA + prefix) > 253:
        return (
            f'"{prefix}" is not a domain: use at most 244 small letters, digits, "-" and ".", '
            "with a letter or digit first and last"
        )
    if not _QUALIFIED.fullmatch(name) or len(name) > 63:
        return (
            f'"{name}" is not a valid name: use at most 63 letters, digits, "-", "_" and ".", '
            "with a letter or digit first and last"
        )
    return None
