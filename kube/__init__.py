"""The API server: a typed client, an informer, leader election.

`client` has the verbs over `requests` and `transport`, `resources` the objects and errors,
`encoding` their JSON. `informer` follows objects, `leadership` elects a leader.
"""
