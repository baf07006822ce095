"""Pools of GPUs: their resources, the choice of a GPU, and the files that containers get.

`plugin` offers the pools. `replicas` and `shares` serve the modes. `share_pool` counts free shares
and chooses a GPU. `pre_start` chooses the GPU again when a container starts. `container_files`
prepares the files of the container. `holders` finds the containers that have started.
"""
