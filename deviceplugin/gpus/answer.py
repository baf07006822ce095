"""What a container gets of the driver: device nodes, the directory of its libraries, variables."""

from collections.abc import Iterable, Mapping

from deviceplugin.api import v1beta1_pb2
from gpu.driver_files import SharedFile
from gpu.nodes import GpuNode

NOTHING: Mapping[str, str] = {}


def response(
    nodes: Iterable[GpuNode] = (),
    driver: SharedFile | None = None,
    *,
    files: Iterable[SharedFile] = (),
    cdi: Iterable[str] = (),
    variables: Mapping[str, str] = NOTHING,
) -> v1beta1_pb2.ContainerAllocateResponse:
    """The answer of Allocate: each node once, readable and writable but not to be made."""
    by_path = {node.path: node for node in nodes}
    every = [*filter(None, [driver]), *files]
    return v1beta1_pb2.ContainerAllocateResponse(
        devices=[
            v1beta1_pb2.DeviceSpec(container_path=path, host_path=node.host, permissions="rw")
            for path, node in by_path.items()
        ],
        mounts=[
            v1beta1_pb2.Mount(
                container_path=file.container, host_path=file.host, read_only=file.read_only
            )
            for file in every
        ],
        envs=dict(variables),
        cdi_devices=[v1beta1_pb2.CDIDevice(name=name) for name in sorted(cdi)],
    )
