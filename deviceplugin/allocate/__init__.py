"""Chooses device ids for a container, and the device nodes and variables that the container gets.

`container_devices` makes the answer of Allocate from `device_files`, `environment` and `cdi`.
`preferred` chooses the best HCAs near GPUs. `device_info` writes the files for Multus.
"""
