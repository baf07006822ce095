"""Pools: what configuration says, in three forms, and which adapters are in which pool."""
