"""Attacks: what a tenant, a full disk or a kill may do to the node, and what stays true then."""
