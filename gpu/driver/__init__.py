"""NVIDIA's driver on this node: its files, its device nodes, NVML, and the GPUs that it shows.

`gpu_inventory` lists the GPUs to offer, `gpu_health` judges them by `nvml`. `driver_files` and
`gpu_device_files` are what containers get of the driver.
"""
