"""Python's view of the files and messages is the C header's, field by field."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from gpu.limits import layout, limits_file, region

HEADER = Path(__file__).parents[3] / "gpu/shim/layout.h"

# By Python's structure: the C struct, and what its fields are called there.
STRUCTS: dict[type[ctypes.LittleEndianStructure], tuple[str, dict[str, str]]] = {
    layout.PfGpuLimit: ("struct pf_gpu_limit", {}),
    layout.PfProcess: ("struct pf_process", {}),
    layout.PfGpu: ("struct pf_gpu", {}),
    layout.PfSlot: ("struct pf_slot", {}),
    layout.PfLimits: ("struct pf_limits", {"header": "magic"}),
    layout.PfRegion: ("struct pf_region", {"header": "magic"}),
    layout.PfRequest: ("struct pf_request", {}),
    layout.PfAnswer: ("struct pf_answer", {}),
}
HEADERS: dict[type[ctypes.LittleEndianStructure], str] = {
    layout.PfLimitsHeader: "struct pf_limits",
    layout.PfRegionHeader: "struct pf_region",
}
CONSTANTS = {
    "PF_VERSION": layout.VERSION,
    "PF_SLOTS": layout.SLOTS,
    "PF_LIMITS_MAGIC": layout.LIMITS_MAGIC,
    "PF_REGION_MAGIC": layout.REGION_MAGIC,
    "PF_NOT_MEASURED": layout.NOT_MEASURED,
    "PF_MUTEX_KIND": layout.MUTEX_KIND,
    "PF_MUTEX_KIND_AT": layout.MUTEX_KIND_AT,
    "PF_PROCESS_NONE": layout.PROCESS_NONE,
    "PF_PROCESS_ALIVE": layout.PROCESS_ALIVE,
    "PF_PROCESS_DEAD": layout.PROCESS_DEAD,
    "PF_SLOT_FREE": layout.SLOT_FREE,
    "PF_SLOT_USED": layout.SLOT_USED,
    "PF_STATUS_OK": layout.STATUS_OK,
    "PF_STATUS_VERSION": layout.STATUS_VERSION,
    "PF_STATUS_STRANGER": layout.STATUS_STRANGER,
    "PF_STATUS_SLOT": layout.STATUS_SLOT,
    "PF_STATUS_BUSY": layout.STATUS_BUSY,
    "offsetof(struct pf_limits, gpu)": layout.GPU_AT,
    "offsetof(struct pf_limits, process)": layout.PROCESS_AT,
    "offsetof(struct pf_region, gpu)": layout.USE_AT,
    "offsetof(struct pf_region, slot)": layout.SLOT_AT,
}


def expected() -> dict[str, int]:
    """C expressions, and the values that Python has for them."""
    values = dict(CONSTANTS)
    for structure, (name, renamed) in STRUCTS.items():
        values[f"sizeof({name})"] = ctypes.sizeof(structure)
        values |= offsets(structure, name, renamed)
    for structure, name in HEADERS.items():
        values |= offsets(structure, name, {})
    return values


def offsets(
    structure: type[ctypes.LittleEndianStructure], name: str, renamed: dict[str, str]
) -> dict[str, int]:
    values = {}
    for field, *_ in structure._fields_:
        described = getattr(structure, field)
        c_name = renamed.get(field, field)
        values[f"offsetof({name}, {c_name})"] = described.offset
        if c_name == field:
            values[f"sizeof((({name} *)0)->{c_name})"] = described.size
    return values


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    directory = tmp_path_factory.mktemp("layout")
    lines = "\n".join(
        f'printf("%llu\\n", (unsigned long long)({expression}));' for expression in expected()
    )
    source = directory / "layout.c"
    source.write_text(
        f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n{lines}\nreturn 0; }}\n'
    )
    program = directory / "layout"
    subprocess.run(["cc", "-Wall", "-Werror", "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(zip(expected(), map(int, printed.split()), strict=True))


def test_every_offset_size_and_number_is_the_headers(compiled: dict[str, int]) -> None:
    assert compiled == expected()


def test_every_field_of_the_header_is_known_here() -> None:
    """A new field in reserved bytes would not move another field, so only this test finds it."""
    text = HEADER.read_text()
    known = {field for structure in (*STRUCTS, *HEADERS) for field, *_ in structure._fields_}
    declared = {
        line.split(";")[0].split("[")[0].split()[-1]
        for line in text.splitlines()
        if line.startswith(("    uint", "    char", "    struct pf")) and ";" in line
    }
    assert declared <= known


def test_fields_that_are_read_at_once_are_those_of_the_structures() -> None:
    assert limits_file._ENTRY.size == ctypes.sizeof(layout.PfProcess)
    slot = layout.PfSlot()
    slot.state, slot.registration = 1, 2
    slot.data_bytes = 3
    assert region._FIELDS.unpack(bytes(slot)) == (1, 2, 3)
