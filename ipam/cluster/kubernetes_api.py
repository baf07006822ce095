"""The API server over HTTP: where it is, who asks, and the connections.

In a pod three files and two variables say that. A kubeconfig has more forms, which the official
client reads. To import that one costs a process 18 MB, so it is imported for a kubeconfig only. Its
models are not used: `documents` decodes 20 times as fast.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode, urlsplit

import msgspec
from urllib3 import (
    BaseHTTPResponse,
    HTTPConnectionPool,
    HTTPSConnectionPool,
    PoolManager,
    Timeout,
)
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError

from ipam.cluster.api import Refused, Unavailable
from ipam.cluster.documents import JSON, JSON_PATCH
from ipam.cluster.pace import Pace
from ipam.cluster.rest_api import TIMEOUT, Body, Lines, Query, Response, RestApi

CONNECT, READ = 2.0, 5.0  # seconds of one request, for each wait
SILENCE = 150.0  # seconds without a line that end a watch; it has a bookmark each minute
CONNECTIONS = 8  # that are kept open
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has the token of its service account, and the certificate of the API server's CA."""

_LOOK_AT_TOKEN = 10.0  # seconds; a kubelet writes another token long before one ends
_KEEP_ALIVE = (  # seconds: a firewall must not forget a connection between two confirmations
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
)

_log = logging.getLogger(__name__)


class KubernetesApi(RestApi):
    """ClusterApi of the pod's own cluster, or of a kubeconfig's. Refused: there is none."""

    def __init__(
        self,
        kubeconfig: Path | None = None,
        *,
        writer: str = "podfabric",
        timeout: float = TIMEOUT,
        pace: Pace | None = None,
    ) -> None:
        self._client = _Client(kubeconfig, writer)
        super().__init__(self._client, writer=writer, timeout=timeout, pace=pace)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class _Access(Protocol):
    """Where the API server is, and who asks it. `prefix` goes before the path of a request."""

    connections: HTTPConnectionPool | PoolManager
    prefix: str

    def headers(self) -> Mapping[str, str]:
        """Who asks, as it is now. Unavailable, OSError."""

    def reload(self) -> None:
        """The server takes the last headers for nobody's: read all again. Refused."""


class _PodAccess:
    """The service account of this process' pod. A proxy of the environment is not used."""

    def __init__(self) -> None:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{each}", "") for each in ("HOST", "PORT"))
        if not (host and port):
            raise Refused("no API server in this pod: KUBERNETES_SERVICE_HOST or _PORT is not set")
        self.reload()
        self.prefix = ""
        self.connections: HTTPConnectionPool | PoolManager = HTTPSConnectionPool(
            host,
            int(port),
            cert_reqs="CERT_REQUIRED",
            ca_certs=str(ACCOUNT / "ca.crt"),
            maxsize=CONNECTIONS,
            retries=False,  # urllib3 would repeat a PUT and a DELETE, which may have had an effect
            socket_options=[*HTTPConnection.default_socket_options, *_KEEP_ALIVE],
        )

    def headers(self) -> Mapping[str, str]:
        token = (ACCOUNT / "token").read_text().strip()
        if not token:
            raise OSError(f"{ACCOUNT / 'token'} is empty")
        return {"Authorization": f"Bearer {token}"}

    def reload(self) -> None:
        try:
            self.headers()
            if not (ACCOUNT / "ca.crt").stat().st_size:
                raise OSError(f"{ACCOUNT / 'ca.crt'} is empty")
        except OSError as error:
            raise Refused(f"no API server in this pod: {error}") from error


class _KubeconfigAccess:
    """What a kubeconfig says, read by the official client."""

    def __init__(self, path: Path) -> None:
        from kubernetes.client import ApiClient, Configuration

        self._path = path
        self._configuration = Configuration()
        self._configuration.retries = False  # as above
        self._configuration.connection_pool_maxsize = CONNECTIONS
        self._configuration.keep_alive = True
        self.reload()
        self._client = ApiClient(self._configuration)
        manager: PoolManager = self._client.rest_client.pool_manager
        host: str = self._configuration.host
        self.connections: HTTPConnectionPool | PoolManager = manager
        self.prefix = host
        if manager.proxy is None:  # the manager would look for the connections at each request
            self.connections = manager.connection_from_url(host)
            self.prefix = urlsplit(host).path.rstrip("/")

    def headers(self) -> Mapping[str, str]:
        from kubernetes.client.exceptions import OpenApiException
        from kubernetes.config import ConfigException

        headers: dict[str, str] = {}
        try:
            self._client.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        except (OpenApiException, ConfigException) as error:
            raise Unavailable(f"no token: {error}") from error
        return headers

    def reload(self) -> None:
        from kubernetes.config import load_kube_config

        try:
            load_kube_config(
                str(self._path), client_configuration=self._configuration, persist_config=False
            )
        except Exception as error:  # a file that is not a kubeconfig: YAMLError, TypeError, ...
            raise Refused(f"no API server in {self._path}: {error}") from error


class _Client:
    """A Transport."""

    def __init__(self, kubeconfig: Path | None, user_agent: str) -> None:
        self._access: _Access = _KubeconfigAccess(kubeconfig) if kubeconfig else _PodAccess()
        self._user_agent = user_agent
        self._headers: dict[str, str] = {}
        self._headers_until = 0.0

    def close(self) -> None:
        connections = self._access.connections
        if isinstance(connections, PoolManager):
            connections.clear()
        else:
            connections.close()

    def send(
        self,
        method: str,
        where: str,
        query: Query,
        body: Body | None,
        accept: str,
        patience: float,
    ) -> Response:
        deadline = time.monotonic() + patience
        limits = (min(CONNECT, patience), min(READ, patience))
        response = self._open(method, where, query, body, accept, limits)
        if response.status == HTTPStatus.UNAUTHORIZED:
            # Nothing was done. The token may be a new one by now.
            _body(response, deadline)
            self._access.reload()
            self._headers_until = 0.0
            response = self._open(method, where, query, body, accept, limits)
        asked = response.headers.get("Retry-After", "")
        retry_after = float(asked) if asked.isdecimal() else 0
        return Response(response.status, _body(response, deadline), retry_after)

    def follow(self, where: str, query: Query) -> Lines:
        response = self._open("GET", where, query, None, JSON, (CONNECT, SILENCE))
        if response.status != HTTPStatus.OK:
            return Lines(response.status, iter([_body(response, time.monotonic() + READ)]))
        return Lines(response.status, _lines(response))

    def _identity(self) -> Mapping[str, str]:
        """Who asks. To read that takes a fifth of the CPU time of a request."""
        now = time.monotonic()
        if now >= self._headers_until:
            self._headers = {"User-Agent": self._user_agent, **self._access.headers()}
            self._headers_until = now + _LOOK_AT_TOKEN
        return self._headers

    def _open(
        self,
        method: str,
        where: str,
        query: Query,
        body: Body | None,
        accept: str,
        limits: tuple[float, float],
    ) -> BaseHTTPResponse:
        headers, sent = {"Accept": accept}, None
        if body is not None:
            headers["Content-Type"] = JSON_PATCH if method == "PATCH" else JSON
            sent = msgspec.json.encode(body)
        url = f"{self._access.prefix}{where}"
        if query:
            url = f"{url}?{urlencode(query)}"
        connect, read = limits
        try:
            headers |= self._identity()
            response: BaseHTTPResponse = self._access.connections.urlopen(
                method,
                url,
                body=sent,
                headers=headers,
                timeout=Timeout(connect=connect, read=read),
                preload_content=False,
            )
        except (HTTPError, OSError) as error:
            raise Unavailable(f"no answer from the API server: {error}") from error
        return response


def _body(response: BaseHTTPResponse, deadline: float) -> bytes:
    """The whole body. One that is complete is used, however late it is."""
    parts: list[bytes] = []
    is_late = False
    try:
        for part in response.stream(1 << 16):
            if is_late:
                raise TimeoutError("it comes too slowly")
            parts.append(part)
            is_late = time.monotonic() > deadline
    except (HTTPError, OSError) as error:
        response.close()
        raise Unavailable(f"the API server's answer was cut: {error}") from error
    response.release_conn()
    return b"".join(parts)


def _lines(response: BaseHTTPResponse) -> Iterator[bytes]:
    """The lines, as they come. What is cut off at the end does not count."""
    rest = b""
    try:
        for part in response.stream(None):
            *lines, rest = (rest + part).split(b"\n")
            yield from filter(None, lines)
    except (HTTPError, OSError) as error:
        _log.debug("a watch ended: %s", error)
    finally:
        response.close()
