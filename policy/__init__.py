"""The administrator's rules for network configurations on a node.

Tenants who may create a NetworkAttachmentDefinition or annotate a pod write network configurations,
and the agent executes them as root. `document` has the keys of a rule, `value_lists` their values.
`rules` reads the rules of config.yaml with safe defaults, `stored_policies` and `follower` add
those of the cluster. `allowance` decides; the plugins ask it before they change anything.
"""
