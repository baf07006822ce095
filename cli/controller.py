"""`podfabric controller`: the controller of cluster-wide addresses (docs/operate/controller.md)."""

import argparse
import logging
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from cli.arguments import file, namespace

if TYPE_CHECKING:
    from ipam.controller.leader import ControllerProcess
    from node.page.feed import ClusterFeed

LEASE = "podfabric-controller"
METRICS = "127.0.0.1:9812"
ELECTION_TIMEOUT = 4.0  # seconds, which leaves time to repeat a failed renewal

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace",
        type=namespace,
        default="podfabric",
        help=f"the namespace of the Lease {LEASE}, whose holder leads (default: podfabric)",
    )
    parser.add_argument(
        "--whereabouts",
        choices=("None", "Read", "Coexist"),
        default="None",
        help="Read: no node gives out addresses that whereabouts' objects hold. Coexist: the "
        "controller also takes blocks from whereabouts for podfabric's nodes (default: None)",
    )
    parser.add_argument(
        "--kubeconfig",
        type=file,
        metavar="FILE",
        help="kubeconfig of the API server (default: as a pod of the cluster)",
    )
    parser.add_argument(
        "--metrics",
        default=METRICS,
        metavar="ADDRESS",
        help=f'loopback address that serves /metrics; "" for none (default: {METRICS})',
    )
    parser.add_argument(
        "--health",
        default="",
        metavar="ADDRESS",
        help='address that serves /healthz and /readyz, such as ":9813" (default: none)',
    )
    parser.add_argument(
        "--pools-per-namespace",
        type=int,
        metavar="NUMBER",
        help="most pools for the definitions of one namespace (default: 100)",
    )
    parser.add_argument(
        "--nv-ipam",
        default="",
        metavar="NAMESPACE",
        help="make AddressPools from nv-ipam's IPPools and CIDRPools in NAMESPACE (default: none)",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    from agent import settings
    from agent.observe import logs
    from kube.resources import ApiError

    logs.configure(
        settings.Settings(log_format=arguments.log_format, log_level=arguments.log_level)
    )
    # Not an Event: `Event.set` needs a lock that the interrupted `wait` may hold.
    ended: SimpleQueue[None] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.put(None))
    try:
        with ExitStack() as stack:
            _serve(arguments, ended, stack)
    except (ApiError, OSError, ValueError) as error:
        sys.stderr.write(f"podfabric controller: {error}\n")
        return 1
    _log.info("stopped")
    return 0


def _serve(arguments: argparse.Namespace, ended: SimpleQueue[None], stack: ExitStack) -> None:
    from base import decoding
    from ipam.controller.definitions import POOLS_PER_NAMESPACE
    from ipam.controller.exposition import exposition
    from ipam.controller.leader import REQUESTS_AT_ONCE, REQUESTS_PER_SECOND, ControllerProcess
    from ipam.nv_ipam.pool_import import following
    from kube.leadership import Leadership
    from kube.requests import Pace
    from kube.transport import KubernetesApi
    from node.conditions import NodeConditions
    from node.page.feed import ClusterFeed

    decoding.build_decoders()  # several threads read their first lists at the same time
    pace = Pace(REQUESTS_PER_SECOND, REQUESTS_AT_ONCE)
    api = KubernetesApi(arguments.kubeconfig, writer="podfabric-controller", pace=pace)
    stack.callback(api.close)
    # A second client, because the rate limit of writes must not delay renewals.
    election = KubernetesApi(
        arguments.kubeconfig, writer="podfabric-controller", timeout=ELECTION_TIMEOUT
    )
    stack.callback(election.close)
    identity = f"{socket.gethostname()}_{uuid.uuid4()}"
    most = arguments.pools_per_namespace
    process = ControllerProcess(
        api,
        Leadership(election, arguments.namespace, LEASE, identity),
        whereabouts=arguments.whereabouts,
        pools_per_namespace=POOLS_PER_NAMESPACE if most is None else most,
        other_pools=partial(following, arguments.nv_ipam) if arguments.nv_ipam else None,
    )
    feed = ClusterFeed(api)
    stack.callback(feed.close)
    _open(arguments.metrics, exposition(process), process, stack, feed)
    _open(arguments.health, None, process, stack)
    _log.info("started, as %s", identity)
    running = threading.Thread(target=_until_it_fails, args=(process.run, ended), name="rounds")
    running.start()
    conditions = NodeConditions(api)
    conditions.start()
    stack.callback(conditions.close)
    ended.get()
    process.stop()
    running.join()


def _open(
    listen: str,
    exposition: Callable[[], bytes] | None,
    process: "ControllerProcess",
    stack: ExitStack,
    feed: "ClusterFeed | None" = None,
) -> None:
    from agent.observe.http import Endpoint

    # A pod has IPv4, IPv6 or both. A socket at "[::]" also accepts IPv4.
    choices = (f"[::]{listen}", f"0.0.0.0{listen}") if listen.startswith(":") else (listen,)
    for choice in filter(None, choices):
        try:
            endpoint = Endpoint(choice, exposition, process.alive, process.ready, feed)
        except OSError as error:
            if choice == choices[-1]:
                raise OSError(
                    f"cannot listen at {choice}: {error.strerror}: free the address, or set "
                    "--metrics or --health to another address"
                ) from None
            continue
        stack.callback(endpoint.close)
        return


def _until_it_fails(serve: Callable[[], None], ended: SimpleQueue[None]) -> None:
    """End the process when `serve` returns or raises, so that the kubelet starts another."""
    try:
        serve()
    finally:
        ended.put(None)
