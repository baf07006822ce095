"""Pools of GPUs: their resources, the choice of a GPU, and the files that containers get."""
