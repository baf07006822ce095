"""GPUs of this node: which there are, how much of each may be given, and what limits containers.

- `inventory` finds them without NVML, and knows what is wrong with each; `nodes` looks up the
  device nodes of NVIDIA's driver.
- `placement` says how much of each is free, and which GPU a container best gets. The device plugin
  gives them to containers (`deviceplugin/gpus`).
- `groups` writes what each group of containers may use of a GPU, for the library in `gpu/shim`
  that counts it; `registration`, `watch` and `shares` are the agent's side of that.

Imports `host` and `base`. It knows neither the kubelet nor pools.
"""
