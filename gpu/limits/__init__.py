"""The limits of containers: the files, sockets and processes of groups.

A group is the processes of one container. `groups` manages the files of all groups. The agent
writes the file `limits` (`limits_file`), and the processes write the file `region`.
`process_registration` registers processes over a `group_socket`. `shims` lists the libraries for
containers. `layout` has the binary layouts of the files and messages.
"""
