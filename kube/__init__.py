"""The API server: a typed client, an informer, leader election."""
