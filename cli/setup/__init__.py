"""Puts executables and libraries on a node."""
