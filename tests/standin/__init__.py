"""Stand-ins for the libraries of a GPU's driver, on a machine without one: libcuda, libnvidia-ml.

They behave as the driver's documentation describes and as tests on real GPUs showed. They also
record what each GPU holds, and tests compare these accounts with podfabric's counts. `build` makes
the libraries, `gpus` describes a node and reads its accounts, `driver` is a process that makes
calls. In C, `node` is the part that all processes of a node share, `cuda` is libcuda, `nvml` is
libnvidia-ml, and `oracle.c` reads the accounts for `gpus`.
"""
