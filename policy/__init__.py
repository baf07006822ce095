"""The administrator's rules for network configurations on a node.

Tenants who may create a NetworkAttachmentDefinition or annotate a pod write network configurations,
and the agent executes them as root. `rules` reads the typed rules with safe defaults from the part
`policy` of config.yaml. Plugins check them before they change anything.
"""
