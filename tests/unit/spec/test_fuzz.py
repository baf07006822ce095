"""Any input is answered with at most one JSON document, and the exit code fits it."""

import contextlib
import io
import json
import os

from hypothesis import given
from hypothesis import strategies as st

from cni.spec.dispatch import answer
from tests.unit.spec.spoken import CONFIG, ENVIRON, Trivial

COMMANDS = ("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION", "NOPE", "")
VARIABLES = (*ENVIRON, "CNI_ARGS", "CNI_NETNS_OVERRIDE")

# An environment can hold all bytes except NUL, as the interpreter decodes them.
values = st.binary(max_size=20).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))
environs = st.dictionaries(st.sampled_from(VARIABLES), values).flatmap(
    lambda given_values: st.builds(
        lambda command, base: {**base, **given_values, "CNI_COMMAND": command},
        st.sampled_from(COMMANDS),
        st.sampled_from(({}, ENVIRON)),
    )
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
keys = st.sampled_from(("name", "cniVersion", "ipam", "prevResult", "args")) | st.text(max_size=5)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
documents = st.one_of(
    st.binary(max_size=200),
    trees.map(lambda tree: json.dumps(tree).encode()),
    st.dictionaries(keys, trees, max_size=4).map(lambda t: json.dumps({**CONFIG, **t}).encode()),
    st.binary(max_size=4).map(lambda raw: json.dumps(CONFIG).encode() + raw),
)


@given(environs, documents)
def test_every_call_has_one_answer(environ: dict[str, str], config: bytes) -> None:
    plugin = Trivial()
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        reply = answer(lambda: plugin, environ, lambda: config)
    assert reply.exit_code in (0, 1)
    if reply.exit_code == 1:
        document = json.loads(reply.document)
        assert document["code"] != 0
        assert document["msg"]
        assert document["cniVersion"]
        assert plugin.requests == []
    else:
        assert len(plugin.requests) == 1
        assert bool(reply.document) is (environ["CNI_COMMAND"] == "ADD")
    assert "Traceback" not in stderr.getvalue()
