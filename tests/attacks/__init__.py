"""Attacks by a tenant, kills and full disks at bad moments, against real processes."""
