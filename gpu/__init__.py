"""GPUs of this node: how many there are, the pools that offer them, and the limits of containers.

- `driver` finds GPUs without NVML, checks their health, and reads the rest from NVML.
- `pools` offers GPUs and shares of GPUs to the kubelet.
- `limits` keeps the limits of each group of containers for the library in `gpu/shim`; `watch`
  compares the limits with the driver's figures and corrects compute shares.
- `limit_service` runs `limits` and `watch`.

`gpu/shim` has the C libraries that containers load in place of NVIDIA's, and `make gpu` builds them
(docs/developers/gpu-library.md).
"""
