"""The resident process of a node. It serves the launchers, so that no call starts an interpreter.

- `main` connects the parts, `settings` reads the configuration, `systemd` talks to systemd.
- `server` owns the socket, `connections` has a client's connection, `framing` the wire format,
  `room` the memory that large requests share.
- `workers` are the threads, `calls` runs a call from the request's bytes to the answer.
- `logs`, `metrics`, `exposition` and `http` are what an operator sees.

The agent does not know what a plugin does.
"""
