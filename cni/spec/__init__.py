"""The CNI protocol, versions 0.1.0 to 1.1.0, without code for the kernel or Kubernetes.

An executable starts in `entry`. `request` reads environment and standard input. `config` decodes
the configuration. `dispatch` calls the plugin (`plugin`) and writes a JSON document (`result`,
`errors`).

This file imports nothing, because imports take time in every call.
"""
