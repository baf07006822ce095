"""Shows an operator the agent's work: logs, metrics, health, events.

`logs` writes the log. `metrics` counts calls and collects the metrics of other parts. `http` serves
the metrics and the health checks. `node_events` writes events.
"""
