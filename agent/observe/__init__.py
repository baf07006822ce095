"""Shows an operator what the agent does: logs, metrics, health, events."""
