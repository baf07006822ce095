"""The address store of one node: SQLite under a file lock."""
