"""Serves the launchers.

`launcher_server` owns the socket. `connections` has a client's connection, and limits the memory of
large requests. `framing` has the wire format. `workers` has the threads. `calls` runs a call, from
the request's bytes to the answer.
"""
