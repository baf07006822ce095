"""What the administrator of a node allows a network configuration to ask for.

Tenants who may create a NetworkAttachmentDefinition or annotate a pod write network configurations,
and the agent executes them as root. `rules` has the typed rules with safe defaults, reads them from
the part `policy` of config.yaml. Plugins check them before they change anything.
"""
