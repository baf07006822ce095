"""Puts executables and libraries on a node.

`executables` recognizes and writes CNI executables, `install` is the command, `shim_files` has the
libraries that keep limits of GPUs.
"""
