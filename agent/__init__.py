"""The resident process of a node: serves the launchers, so that nobody pays an interpreter's start.

`framing` is what launcher and agent say to each other, `server` the socket, `connections` one
client each, `room` the memory that large requests share, `workers` the threads, `calls` one call
from a request's bytes to its answer. `settings` is /etc/podfabric/config.yaml, `logs`, `metrics`
and `http` what an operator sees, `systemd` how it is started and watched, `main` puts the parts
together. What a plugin does is none of its business.
"""
