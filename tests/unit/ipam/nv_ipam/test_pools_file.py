"""The file of what a node saw of nv-ipam's pools: a damaged one is a clear error."""

from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.nv_ipam.translate import NodePools, PoolsFile


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = PoolsFile(tmp_path)
    assert file.read() is None
    file.write(NodePools())
    assert file.read() == NodePools()


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"pools": {"\xff": 1}}'])
def test_a_damaged_file_is_an_error_until_it_is_written_again(
    tmp_path: Path, damage: bytes
) -> None:
    file = PoolsFile(tmp_path)
    Path(file.path).write_bytes(damage)
    with pytest.raises(CNIError) as raised:
        file.read()
    assert raised.value.code == Code.STORE_DAMAGED
    assert file.path in raised.value.message
    file.write(NodePools())
    assert file.read() == NodePools()
