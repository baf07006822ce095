"""The administrator's rules, which limit the network configurations of tenants on a node.

A tenant who may create a NetworkAttachmentDefinition or annotate a pod can write a network
configuration. The agent executes the configuration as root. `document` parses a rule, and
`value_lists` the lists of values in a rule. `rules` reads the rules of config.yaml, with safe
defaults. `stored_policies` and `follower` add the rules of the cluster. `allowance` checks an
attachment against the rules, before a plugin changes anything.
"""
