"""Allocation: which nodes and variables a container gets, and which device ids it best gets.

`container_devices` makes the answer of Allocate from `device_files`, `environment` and `cdi`.
`preferred` chooses the best HCAs near GPUs. `device_info` writes the files for Multus.
"""
