"""NVIDIA's driver on this node: its files, its device nodes, NVML, and the GPUs that it shows."""
