"""The command `podfabric`, the top layer.

`commands` imports the module of a command. `output` prints tables and JSON. `node` reads the state
of the node. `checks` has the checks of `doctor`. `setup` installs executables.
"""
