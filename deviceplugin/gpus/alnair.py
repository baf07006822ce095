"""The variables that containers have from Alnair's device plugin, with `compat: alnair`.

They tell programs and scripts of such an image what the container has. Nothing depends on them
here: limits are in files that a container cannot change. Variables of Alnair's that only its own
library reads are not set, since that library is not there: LD_PRELOAD, ALNAIR_SOCKET,
ALNAIR_WORKSPACE_PATH.

Source: CentaurusInfra/alnair, alnair-device-plugin/pkg/devicepluginserver.
"""

from collections.abc import Mapping

from gpu.group_limits import Limit


def variables(group: str, limit: Limit) -> Mapping[str, str]:
    """The variables for one resource of a container.

    Args:
        group: the container's group, for memory; "" for time, whose group is not known.
        limit: what is asked for of the resource.
    """
    if group:
        return {"ALNAIR_ID": group}
    return {"ALNAIR_VGPU_COMPUTE_PERCENTILE": str(min(round(limit.compute_share * 100), 100))}
