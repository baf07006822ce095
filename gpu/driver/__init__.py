"""NVIDIA's driver on this node: its files, its device nodes, NVML, and the GPUs.

`gpu_inventory` lists the GPUs to offer. `gpu_health` finds the faults of GPUs with `nvml`.
`driver_files` and `gpu_device_files` find the driver's files and device nodes that containers get.
"""
