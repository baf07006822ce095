"""GPUs of this node: which there are, how much of each may be given, and what limits containers.

- `driver` finds them without NVML, knows what is wrong with each, and asks NVML.
- `pools` are the GPUs that the device plugin offers, and what containers get of them.
- `limits` are what each group of containers may use of a GPU, for the library in `gpu/shim` that
  counts it; `watch` compares that with what the driver says, and corrects shares of time.
- `limit_service` runs both from start to close.

The libraries in `gpu/shim` are C: containers load them in place of NVIDIA's (docs/gpu-limits.md).
`layout.h` is what they share with the agent, `hooks.h` the table of functions that they stand in
for; `stubs.c` makes the exports of it. `make gpu` builds them.
"""
