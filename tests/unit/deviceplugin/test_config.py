"""Our own configuration: its keys, and the texts of its mistakes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.kubelet.extended_resources import resource_problem
from deviceplugin.pools.formats import load, parse
from deviceplugin.pools.pool_config import DEFAULT, ConfigError, DevicePluginConfig, PoolConfig
from host.sysfs.selectors import Selector
from tests.plugins import CHECKOUT


def test_no_file_and_no_pools_are_one_shared_pool_of_what_works(tmp_path: Path) -> None:
    expected = DevicePluginConfig(
        pools=(PoolConfig(resource="rdma/hca", slots=64, only_working=True),)
    )
    assert load(tmp_path / "absent/config.yaml") == expected
    for content in (b"", b"agent: {workers: 3}", b"gpus:\n", b"# nothing\n"):
        assert parse(content, "f") == expected


def test_an_empty_list_is_no_pool() -> None:
    assert parse(b"pools: []", "f").pools == ()


def test_every_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
pools:
  - name: rdma/all
    mode: all
    amount: 7
    nodes: [umad, issm]
    cdi: true
    numa: false
    overlap: true
    selectors:
      - {drivers: [mlx5_core], pfNames: ["ens1#0-3,5"]}
      - {rdmaDevices: [mlx5_0], isRdma: true}
  - name: example.com/Shared_HCA.1
    slots: 3
    placement: pack
    selectors: {linkTypes: [infiniband]}
  - {name: a/one, mode: exclusive}
  - {name: a/plain, mode: exclusive, rdma: false}
"""
    )
    assert load(path) == DevicePluginConfig(
        pools=(
            PoolConfig(
                resource="rdma/all",
                mode="all",
                amount=7,
                umad=True,
                issm=True,
                cdi=True,
                numa=False,
                overlap=True,
                selectors=(
                    Selector(drivers=("mlx5_core",), pfNames=("ens1#0-3,5",)),
                    Selector(rdmaDevices=("mlx5_0",), isRdma=True),
                ),
            ),
            PoolConfig(
                resource="example.com/Shared_HCA.1",
                slots=3,
                placement="pack",
                selectors=(Selector(linkTypes=("infiniband",)),),
            ),
            PoolConfig(resource="a/one", mode="exclusive", used="named"),
            PoolConfig(resource="a/plain", mode="exclusive", used="named", rdma=False),
        ),
    )


def test_json_is_read_as_json() -> None:
    text = b'{"pools":\n\t[{"name": "rdma/a", "mode": "all"}]}'
    assert parse(text, "f").pools == (PoolConfig(resource="rdma/a", mode="all"),)


def pool(text: str) -> bytes:
    return f"pools: [{{name: rdma/a}}, {{{text}}}]".encode()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"pool: []", 'f: pool: unknown key: did you mean "pools"?'),
        (b"pools: ", "f: pools: expected a list of pools, got None"),
        (b"pools: {name: a/b}", "f: pools: expected a list of pools, got {'name': 'a/b'}"),
        (b"pools: [3]", "f: pools[0]: expected keys with values, got 3"),
        (b"pools: [{}]", "f: pools[0].name: is required: write domain/name"),
        (
            b"pools: []\nresourceList: []",
            "f: resourceList: no resources configuration found: remove the key",
        ),
        (
            pool("name: rdma/b, rdma: false, nodes: [umad]"),
            'f: pools[1].nodes: needs RDMA devices, but the pool has "rdma: false": remove one',
        ),
        (
            pool("name: rdma/b, rdma: false, selectors: [{}, {isRdma: true}]"),
            'f: pools[1].selectors.isRdma: needs RDMA devices, but the pool has "rdma: false"',
        ),
        (pool("name: rdma/b, rdma: 'no'"), "f: pools[1].rdma: 'no': expected bool, got str"),
        (
            b"pools: []\nperiodicUpdateInterval: 3",
            "f: periodicUpdateInterval: is only for files with configList",
        ),
        (b"pools: &a [*a]", "f: pools[0]: expected keys with values, got [[...]]"),
        (pool("name: rdma/b, slot: 3"), 'f: pools[1].slot: unknown key: did you mean "slots"?'),
        (
            pool("name: rdma/b, selectors: [{pfName: [a]}]"),
            'f: pools[1].selectors[0].pfName: unknown key: did you mean "pfNames"?',
        ),
        (
            pool("name: rdma/b, selectors: {pfNames: ['a#2-1']}"),
            "f: pools[1].selectors.pfNames[0]: 'a#2-1': \"2-1\" is not a range of VFs",
        ),
        (
            pool("name: rdma/b, selectors: 3"),
            "f: pools[1].selectors: expected keys with values, or",
        ),
        (
            pool("name: rdma/b, mode: some"),
            "f: pools[1].mode: 'some': expected one of all, exclusive",
        ),
        (
            pool("name: rdma/b, nodes: [ucm]"),
            "f: pools[1].nodes[0]: 'ucm': expected one of umad, issm",
        ),
        (pool("name: rdma/b, slots: 0"), "f: pools[1].slots: 0: expected int >= 1"),
        (pool("name: rdma/b, slots: 1001"), "f: pools[1].slots: 1001: expected int <= 1000"),
        (pool("name: rdma/b, slots: '3'"), "f: pools[1].slots: '3': expected int, got str"),
        (
            pool("name: rdma/b, mode: all, amount: 10001"),
            "f: pools[1].amount: 10001: expected int <= 10000",
        ),
        (
            pool("name: rdma/b, mode: exclusive, slots: 3"),
            "f: pools[1].slots: is for mode shared, but this pool has mode exclusive: remove the",
        ),
        (
            pool("name: rdma/b, amount: 3"),
            "f: pools[1].amount: is for mode all, but this pool has mode shared",
        ),
        (
            pool("name: rdma/b, mode: all, placement: pack"),
            "f: pools[1].placement: is for mode shared, but this pool has mode all",
        ),
        (pool("name: hca"), "f: pools[1].name: 'hca': write domain/name"),
        (pool("name: rdma/a"), "f: rdma/a: two pools have this resource"),
        (
            b"pools: [{name: a.b/c-d}, {name: a-b/c.d}]",
            "f: a.b/c-d and a-b/c.d: both would use the environment variable PCIDEVICE_A_B_C_D",
        ),
        (b"pools: [{name: A/b}]", "f: pools[0].name: 'A/b': \"A\" is not a domain"),
    ],
)
def test_a_mistake_is_named(content: bytes, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(content, "f")
    assert str(raised.value).startswith(error)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("resource", "valid"),
    [
        *((name, True) for name in ("rdma/hca", "jarvice.com/rdma", "tencent.com/rdma")),
        *((name, True) for name in ("ib.plugin/infiniband", "a/b", "a/B_c.d-e", "1.2/3")),
        ("a" * 63 + "/" + "b" * 63, True),
        (".".join(["a" * 60] * 4) + "/b", True),
        (".".join(["a" * 61] * 4) + "/b", False),  # too long behind "requests."
        ("a/" + "b" * 64, False),
        *((name, False) for name in ("hca", "a/b/c", "/b", "a/", "A/b", "a_b/c", "a./b", "-a/b")),
        *((name, False) for name in ("a/-b", "a/b-", "a/b c", "a/ü", "a/b\n", "a\n/b", "a/b$$")),
        *((name, False) for name in ("kubernetes.io/x", "a.kubernetes.io/x", "xkubernetes.io/x")),
        *((name, False) for name in ("requests.a/b", "cpu", "")),
    ],
)
def test_resource_names_are_those_of_extended_resources(resource: str, valid: bool) -> None:
    """Kubernetes, pkg/apis/core/v1/helper: IsExtendedResourceName."""
    assert (resource_problem(resource) is None) is valid


def test_the_variable_can_be_used_by_a_shell() -> None:
    assert PoolConfig(resource="intel.com/sriov-net_0").variable == "INTEL_COM_SRIOV_NET_0"


def test_a_file_that_must_be_there_and_is_not_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match=f"^{path}: this file does not exist$"):
        load(path, required=True)
    with pytest.raises(ConfigError, match=f"^{tmp_path}: cannot be read: Is a directory"):
        load(tmp_path)


def test_cdi_can_be_told_for_every_pool() -> None:
    found = parse(b"pools: [{name: a/b}, {name: a/c, cdi: false}]", "f", cdi=True).pools
    assert [pool.cdi for pool in found] == [True, True]
    assert DEFAULT.cdi is False


def test_a_prefix_is_for_files_that_have_none() -> None:
    with pytest.raises(ConfigError, match=r"^f: -resource-prefix is for files with"):
        parse(b"pools: [{name: a/b}]", "f", prefix="intel.com")


KEYS = "pools devices agent name mode all slots selectors configList resourceList resourceName "


@given(st.text("abcdegilmnoprstx:,/ {}[]&*!'\"\n-#|1", max_size=60) | st.binary(max_size=60))
def test_any_content_is_a_configuration_or_an_error(content: bytes | str) -> None:
    try:
        parse(content if isinstance(content, bytes) else content.encode(), "f")
    except ConfigError as error:
        assert str(error).startswith("f: ")


@given(
    st.dictionaries(
        st.sampled_from(["pools", "configList", "resourceList", "gpus"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(KEYS.split()),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=4,
    )
)
def test_any_shape_is_a_configuration_or_an_error(document: object) -> None:
    import yaml

    try:
        parse(yaml.safe_dump(document).encode(), "f")
    except ConfigError as error:
        assert str(error).startswith("f: ")


def test_the_documentation_has_every_key_of_pool_and_selector() -> None:
    from deviceplugin.pools.formats import POOL_KEYS

    text = (CHECKOUT / "docs/use/devices.md").read_text()
    rows = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")}
    for key in (*POOL_KEYS, *Selector.__struct_fields__):
        assert f"`{key}`" in rows
