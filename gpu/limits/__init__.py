"""The GPU limits of groups. A group is the processes of one container.

`groups` manages the files of all groups. The agent writes the file `limits`, and the processes of
the group write the file `region`. `process_registration` registers processes.
"""
