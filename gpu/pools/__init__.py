"""Pools of GPUs: their resources, what containers get, and when it is decided."""
