"""Shows an operator what the agent does: logs, metrics, health, events.

`logs` writes the log, `metrics` counts calls and collects the metrics of other parts, `http` serves
them with the health checks, `node_events` writes events.
"""
