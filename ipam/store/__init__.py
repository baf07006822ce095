"""The store of one node: reservations and leased blocks, in SQLite under a file lock."""
