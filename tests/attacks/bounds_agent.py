"""The agent of a node, with `noop` among its plugins: `python -m` runs it."""

import os
import sys

from agent import resident as agent
from base.paths import Paths
from tests.plugins.noop import Noop

if __name__ == "__main__":
    sys.exit(agent.run(Paths.from_environ(os.environ), lambda addresses: {"noop": Noop}))
