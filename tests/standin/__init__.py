"""Stand-ins for the libraries of a GPU's driver, on a machine without one: libcuda, libnvidia-ml.

They behave as the driver's documentation says and as it was seen to, and account for themselves
what lies on each GPU: tests compare that with what podfabric counted. `build` makes the libraries,
`gpus` describes a node and reads its accounts, `driver` is a process that makes calls. In C: `node`
is what all processes of a node share, `cuda` is libcuda, `nvml` is libnvidia-ml, `oracle.c` is what
`gpus` reads with.
"""
