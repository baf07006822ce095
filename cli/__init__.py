"""The command `podfabric`: the top layer, which may import every other.

`main` starts `commands`, which has one module per command. `output` prints tables, JSON and YAML.
`node` reads the node, `checks` are those of `doctor`, `setup` installs executables.
"""
