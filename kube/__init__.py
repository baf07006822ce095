"""A typed client of the API server, an informer, and leader election.

`client` has the verbs, `requests` their common part, and `transport` sends requests. `resources`
has the objects and errors, and `encoding` encodes and decodes their JSON. `informer` follows
objects. `leadership` elects a leader.
"""
