"""The generated code is what bin/proto builds from the .proto, and every method of the .proto is served."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

from runnel import errors
from runnel.errors import RunnelError
from runnel.protocols.grpc import service
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.server import statuses

ROOT = Path(__file__).parents[3]
GENERATED = ROOT / "src" / "runnel" / "protocols" / "grpc" / "generated"
SECONDS_MAX = 60


def test_generated_code_is_what_the_proto_builds(tmp_path: Path) -> None:
    protoc = (sys.executable, "-m", "grpc_tools.protoc")
    outputs = (f"--python_out={tmp_path}", f"--pyi_out={tmp_path}")
    subprocess.run(
        [*protoc, f"--proto_path={ROOT / 'proto'}", *outputs, "runnel/v1/runnel.proto"],
        check=True,
        timeout=SECONDS_MAX,
    )
    for name in ("runnel_pb2.py", "runnel_pb2.pyi"):
        built = (tmp_path / "runnel" / "v1" / name).read_text(encoding="utf-8")
        committed = (GENERATED / name).read_text(encoding="utf-8")
        assert built == committed, f"{name} is not what the .proto says: run bin/proto"


def test_every_method_has_a_verb() -> None:
    methods = {method.name for method in service.SERVICE.methods}
    assert methods == {*service._UNARY_METHODS, *service._SERVER_STREAMS, *service._TWO_WAY_STREAMS}


def test_every_error_has_a_status() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    codes = {kind.code for kind in kinds if issubclass(kind, RunnelError)}
    assert codes == set(statuses._STATUSES)


def test_a_failure_is_told_in_ascii_and_not_at_length() -> None:
    error = statuses.error_of(RunnelError("ü" * 10_000 + "\ud800"))
    assert len(error.text) == 500
    assert isinstance(pb.Error.FromString(error.SerializeToString()), pb.Error)
    status = statuses.status_of(RunnelError("\ud800"))
    assert all(value.isascii() for _, value in status.metadata)
