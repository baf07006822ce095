"""Puts executables and libraries on a node.

`executables` recognizes and writes CNI executables. `install` has the commands. `shim_files`
installs the libraries that enforce the limits of GPUs.
"""
