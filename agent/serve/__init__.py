"""Serves the launchers.

`launcher_server` owns the socket, `connections` has a client's connection, `framing` the wire
format. `request_memory` limits the memory of large requests. `workers` are the threads, and `calls`
runs a call from the request's bytes to the answer.
"""
