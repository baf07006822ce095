"""Chooses the store of a request's addresses: the node's store, or the node's leased blocks.

`ipam.scope` in config.yaml is "node" or "cluster". `"scope"` in the `ipam` object of a network
overrides config.yaml. Only ADD and STATUS read the scope. All other verbs use the node's store.
"""

import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from base import documents
from base.documents import DocumentError
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from ipam.config import options as ipam_options
from ipam.config.options import IpamOptions
from ipam.config.requested_ips import final_sets
from ipam.nv_ipam import translate
from ipam.nv_ipam.translate import is_nv_ipam
from ipam.ranges import RangeSet
from ipam.store.reservations import Owner
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles

if TYPE_CHECKING:
    from ipam.leases.claim_request import Claims
    from ipam.leases.leased_store import ClusterStore

PART = "ipam"
"""The top-level key of these settings in config.yaml."""

Scope = Literal["node", "cluster"]
Source = Callable[[], Scope]
"""Returns the scope of this node. Raises CNIError if it cannot be read."""


class AddressSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part `ipam` of config.yaml. With `nv_ipam`, agents serve nv-ipam's pools in the namespace
    `nv_ipam_namespace`."""

    scope: Scope = "node"
    nv_ipam: bool = False
    nv_ipam_namespace: str = "nvidia-network-operator"


def node_only() -> Scope:
    return "node"


def of(part: object, name: str) -> AddressSettings:
    """The settings in the part `ipam` of the file `name`. Raises DocumentError."""
    shapes = typing.get_type_hints(AddressSettings, include_extras=True)
    settings = AddressSettings(**documents.fields(part, shapes, f"{name}: {PART}"))
    if settings.nv_ipam and settings.scope != "cluster":
        raise DocumentError(
            f"{name}: {PART}.nv_ipam needs {PART}.scope cluster, because agents read pools from "
            f"the API server: set {PART}.scope to cluster"
        )
    return settings


def settings(path: Path) -> AddressSettings:
    """The settings in that file; the defaults if it is missing. Raises CNIError 5."""
    try:
        content = documents.decode(documents.read(path), str(path))
        return of(documents.mapping(content, str(path)).get(PART), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return AddressSettings()
    except (DocumentError, OSError) as error:
        raise CNIError(
            Code.IO_FAILURE,
            f"cannot read the scope of addresses ({error}): nothing was done; correct {path}",
        ) from None


def declared(request: Request) -> tuple[IpamOptions, Sequence[RangeSet]]:
    """The options and sets of a request, without nv-ipam's addresses. Raises CNIError 4 or 7."""
    if is_nv_ipam(request.config):
        return translate.declared(request.config, request.arguments)
    options = ipam_options.read(request.config)
    return options, final_sets(options, request.arguments)


class Stores:
    """Opens the stores of a node. Without `claims`, this process leases no blocks."""

    def __init__(
        self,
        files: Path | StoreFiles,
        scope: Source = node_only,
        claims: "Claims | None" = None,
        **timing: Any,  # noqa: ANN401 - a clock, and seconds
    ) -> None:
        if claims is not None:  # in an agent, the first ADD should not wait for imports
            import ipam.leases.leased_store  # noqa: F401
        self._files = files
        self._scope = scope
        self._claims = claims
        self._directory = files if isinstance(files, Path) else files.directory
        self._timing = timing

    def asked(self, request: Request) -> tuple[IpamOptions, Sequence[RangeSet]]:
        """The options and sets of a request. Raises CNIError 4 or 7, and errors of `translate`."""
        if not is_nv_ipam(request.config):
            return declared(request)
        pools = translate.read_pools(self._directory)
        return translate.translate(request.config, request.arguments, pools)

    def options(self, request: Request) -> IpamOptions:
        """The options of a request's network. Raises CNIError as `asked` does."""
        if is_nv_ipam(request.config):
            return self.asked(request)[0]
        return ipam_options.read(request.config)

    def of_node(self, boot: str) -> SqliteStore:
        return SqliteStore(self._files, boot)

    def failed(self, owner: Owner, error: CNIError) -> None:
        if self._claims is not None:
            self._claims.failed(owner, error)

    def of_request(self, options: IpamOptions, boot: str) -> "SqliteStore | ClusterStore":
        if (options.scope or self._scope()) == "node":
            return self.of_node(boot)
        from ipam.leases.claim_request import of_agent
        from ipam.leases.leased_store import ClusterStore  # most nodes never need this import

        leased = {
            (range_.domain, range_.network)
            for range_set in options.sets
            for range_ in range_set.ranges
        }
        return ClusterStore(
            self._files, boot, of_agent(self._claims), leased, sticky=options.sticky, **self._timing
        )
