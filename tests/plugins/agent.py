"""An agent for tests: ours, with the doubles among its plugins, and paths from each request.

The real agent takes its roots only from its own environment. Here one agent serves every test of a
session, and each test has its own directories.
"""

import os
import sys
from collections.abc import Mapping

from agent import resident as agent
from agent.serve.calls import Loader
from base.paths import Paths
from cni.ipoib.plugin import IPoIB
from cni.spec.plugin import Plugin
from ipam.plugin import AddressPlugin, IpamExecutable
from ipam.store_choice import Stores
from tests.plugins.noop import Noop


def _ipoib(environ: Mapping[str, str]) -> Plugin:
    return IPoIB(Paths.from_environ(environ))


def _ipam(environ: Mapping[str, str]) -> Plugin:
    paths = Paths.from_environ(environ)
    return IpamExecutable(AddressPlugin(Stores(paths.ipam), paths.boot_id), paths.locks)


PLUGINS: Mapping[str, Loader] = {"ipoib": _ipoib, "podfabric-ipam": _ipam, "noop": Noop}

if __name__ == "__main__":
    sys.exit(agent.run(Paths.from_environ(os.environ), lambda addresses: PLUGINS))
