"""The resident process of a node. It runs each call, so that no call starts an interpreter.

- `resident` connects the parts, `settings` reads the configuration, `presence` publishes the state.
- `serve` answers the launchers. `observe` has the HTTP endpoint, the log, the metrics and the
  events.
- `leasing` makes the client that leases addresses. `gpu_limits` keeps the limits of GPUs.
  `policies` has the rules.
- `leave_node` removes everything when podfabric leaves the node.
"""
