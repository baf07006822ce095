"""GPUs of this node: which there are, how much of each may be given, and the nodes they need.

- `inventory` finds them without NVML, and knows what is wrong with each.
- `placement` says how much of each is free, and which GPU a container best gets.
- `nodes` looks up the device nodes of NVIDIA's driver.

The device plugin gives them to containers (`deviceplugin/gpus`).
"""
