"""Pools of GPUs: their resources, the choice of a GPU, and the files that containers get.

`plugin` offers the pools. `replicas` and `shares` are the modes, `share_pool` chooses a GPU,
`pre_start` does so when a container starts, and `container_files` prepares its files.
"""
