"""Offers the GPUs of this node to containers, and limits the use of shared GPUs.

- `driver` finds the GPUs and queries NVML.
- `pools` offers GPUs and shares of GPUs to the kubelet.
- `limits` writes the limits of each container into files.
- `watch` compares the use of each container with the limits.
- `limit_service` runs `limits` and `watch`.

`gpu/shim` has C libraries that containers load in place of NVIDIA's libraries
(docs/developers/gpu-library.md).
"""
