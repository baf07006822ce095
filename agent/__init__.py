"""The resident process of a node. It runs each call, so that no call starts an interpreter.

`resident` connects the parts. `serve` answers the launchers. `observe` has the HTTP endpoint, the
log, the metrics and the events.
"""
