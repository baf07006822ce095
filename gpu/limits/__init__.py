"""Limits of GPUs for groups of containers: files, sockets, registered processes."""
