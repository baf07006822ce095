"""Allocation: which nodes and variables a container gets, and which device ids it best gets."""
