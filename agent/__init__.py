"""The resident process of a node. It serves the launchers, so that no call starts an interpreter.

- `resident` connects the parts, `settings` reads the configuration, `presence` tells what it does.
- `serve` answers the launchers, `observe` shows an operator what happens.
- `leasing` runs the lessee of addresses, `gpu_limits` the limits of GPUs, `policies` the rules.
- `leave_node` removes everything when podfabric leaves the node.

The agent does not know what a plugin does.
"""
