"""The command `podfabric`. As the top layer, it may import every other layer.

`main` calls `commands`, which imports the module of the command. `output` prints tables and JSON.
`node` reads the state of the node. `checks` has the checks of `doctor`. `setup` installs
executables.
"""
