"""Pools: what configuration says, in three forms, and which HCAs are in which pool."""
