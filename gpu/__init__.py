"""The GPUs of this node, the pools that offer the GPUs, and the limits of containers.

- `driver` finds the GPUs and the driver's files, and queries NVML for memory, use and errors.
- `pools` offers GPUs and shares of GPUs to the kubelet.
- `limits` writes the limits of each container into files for the library in `gpu/shim`.
- `watch` compares the limits with the driver's figures and corrects compute shares.
- `limit_service` runs `limits` and `watch`.

`gpu/shim` has the C libraries that containers load in place of NVIDIA's libraries. `make gpu`
builds the libraries (docs/developers/gpu-library.md).
"""
