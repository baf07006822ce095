"""The CNI protocol, versions 0.1.0 to 1.1.0, and nothing else: no kernel, no Kubernetes.

A request comes in as environment and standard input (`request`), is answered by a plugin
(`plugin`) through `dispatch`, and leaves as one JSON document (`result`, `errors`).
`entry` is what an executable starts; it answers VERSION without importing anything more.

This file imports nothing on purpose: imports are paid on every call.
"""
