"""What a tenant may try, and kills and full disks at bad moments, against real processes."""
