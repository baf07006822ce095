"""The resident process of a node. It serves the launchers, so that no call starts an interpreter.

- `resident` connects the parts, `settings` reads the configuration, `presence` publishes the state.
- `serve` answers the launchers, `observe` has the endpoint, the log, the metrics and the events.
- `leasing` runs the lessee of addresses, `gpu_limits` the limits of GPUs, `policies` the rules.
- `leave_node` removes everything when podfabric leaves the node.

The agent calls every plugin through the same interface (`cni.spec.plugin`).
"""
