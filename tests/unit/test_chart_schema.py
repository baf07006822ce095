"""The chart's schema of `config` accepts what the agent accepts: same keys, limits and choices."""

import json
from pathlib import Path
from typing import Any

import msgspec

from agent.settings import Settings
from deviceplugin.pools.formats import POOL_KEYS
from deviceplugin.pools.pool_config import PARTS
from gpu import gpu_pool_keys
from host.sysfs.selectors import Selector
from policy import rules

CHART = Path(__file__).resolve().parents[2] / "deploy/chart"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
CONFIG = SCHEMA["properties"]["config"]
POOL = CONFIG["properties"]["pools"]["items"]
COMPARED = ("type", "minimum", "maximum", "enum")


def compared(schema: dict[str, Any]) -> dict[str, Any]:
    """The part of a value's schema that both say in the same way."""
    found = {key: schema[key] for key in COMPARED if key in schema}
    return found | ({"enum": sorted(found["enum"])} if "enum" in found else {})


def test_settings_are_those_of_the_code() -> None:
    fields = (f for f in msgspec.structs.fields(Settings) if f.name not in ("policy", "ipam"))
    ours = {each.encode_name: msgspec.json.schema(each.type) for each in fields}
    charts = CONFIG["properties"]["agent"]["properties"]
    assert sorted(charts) == sorted(ours)
    for key, value in ours.items():
        if "enum" in value or "type" in value:
            wanted = compared({"type": "string"} | value if "enum" in value else value)
            assert compared(charts[key]) == wanted, key


def test_keys_of_the_policy_are_those_of_the_code() -> None:
    assert sorted(CONFIG["properties"]["policy"]["properties"]) == sorted(rules.SHAPES)


def test_pools_are_those_of_the_code() -> None:
    charts = POOL["properties"]
    assert sorted(charts) == sorted(POOL_KEYS)
    for key in ("amount", "slots", "rdma", "cdi", "numa", "overlap", "mode", "placement"):
        value = msgspec.json.schema(POOL_KEYS[key])
        wanted = compared({"type": "string"} | value if "enum" in value else value)
        assert compared(charts[key]) == wanted, key


def test_limits_of_gpus_are_those_of_the_code() -> None:
    charts = CONFIG["properties"]["gpuLimits"]["properties"]
    assert sorted(charts) == sorted(gpu_pool_keys.LIMIT_KEYS)
    wanted = {"type": "string"} | msgspec.json.schema(gpu_pool_keys.LIMIT_KEYS["onOveruse"])
    assert compared(charts["onOveruse"]) == compared(wanted)


def test_pools_of_gpus_are_those_of_the_code() -> None:
    charts = CONFIG["properties"]["gpus"]["items"]["properties"]
    assert sorted(charts) == sorted(gpu_pool_keys.KEYS)


def test_selectors_are_those_of_the_code() -> None:
    selectors = POOL["properties"]["selectors"]
    assert selectors["then"]["items"] == selectors["else"] == {"$ref": "#/definitions/selector"}
    single = SCHEMA["definitions"]["selector"]
    assert sorted(single["properties"]) == sorted(Selector.__struct_fields__)


def test_parts_are_those_of_the_code() -> None:
    # The chart has a value of its own for the scope: it decides on more than the file.
    assert sorted(CONFIG["properties"]) == sorted({*PARTS} - {"ipam"})
