"""Limits of groups of containers: their files, their sockets, and their processes."""
