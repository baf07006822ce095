"""GPUs that several containers share: limits of memory and of compute time.

`shim/` is the library in C that a container's CUDA programs load as libcuda, `shares` the agent's
part of compute shares. This package may import `host` and `base`, and knows no kubelet and no CNI.
"""
