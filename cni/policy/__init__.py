"""What the administrator of a node allows a network configuration to ask for.

Whoever may create a NetworkAttachmentDefinition or annotate a pod writes network configurations,
and the agent that carries them out is root. `rules` has the typed rules with their safe defaults,
reads them from the part `policy` of config.yaml, and makes the error for what they do not allow.
Plugins ask them before they change anything.
"""
