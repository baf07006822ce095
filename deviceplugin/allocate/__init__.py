"""Chooses device ids for a container, and makes the answer of Allocate.

`container_devices` makes the answer from `device_files`, `environment`, `cdi` and `memlock`.
`preferred` chooses the best HCAs near GPUs. `device_info` writes the files for Multus.
"""
