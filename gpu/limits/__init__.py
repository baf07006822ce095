"""Limits of groups of containers: their files, their sockets, and their processes.

A group is the processes of one container. `groups` has the files of all groups: `limits_file`,
which the agent writes, and `region`, which the processes write. `process_registration` admits
processes over a `group_socket`. `shims` has the libraries, `layout` the binary form.
"""
