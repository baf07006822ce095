"""Extended resources, as the kubelet accepts them: their names, and how many ids they may have."""

import re

ID_BYTES = 70  # at most, of a device in a ListAndWatch answer
LIST_BYTES = 3_670_016  # 3.5 MiB, since gRPC accepts at most 4 MiB
MOST_IDS = LIST_BYTES // ID_BYTES
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_QUOTA = "requests."  # the prefix of the name in a ResourceQuota, where it must be valid too


def resource_problem(resource: str) -> str | None:
    """Why the kubelet would refuse that name of an extended resource; `None` if it accepts it.

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
            f'"{prefix}" is not a domain: use small letters, digits, "-" and ".", a letter or '
            "digit first and last, at most 244 characters"
        )
    if not _QUALIFIED.fullmatch(name) or len(name) > 63:
        return (
            f'"{name}" contains invalid characters or too many: use letters, digits, "-", "_" '
            'and ".", a letter or digit first and last, at most 63 characters'
        )
    return None
