"""Blocks that are not run but can be wrong all the same: settings, units, rules, images, programs for elsewhere."""

from __future__ import annotations

import ast
import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from runnel.config import load
from tests.docs.pages import ROOT, Block, PageError, Word
from tests.docs.shell import check_command, runnel_commands, statements

_INSTRUCTION: Final = re.compile(
    r"ADD|ARG|CMD|COPY|ENTRYPOINT|ENV|EXPOSE|FROM|HEALTHCHECK|LABEL|RUN|STOPSIGNAL|USER|VOLUME|WORKDIR"
)
_SECTIONS: Final = frozenset({"Unit", "Service", "Install", "Timer", "Socket", "Path"})
_OF_SCRAPES: Final = frozenset(
    {
        "job_name",
        "scrape_interval",
        "static_configs",
        "authorization",
        "scheme",
        "tls_config",
        "metrics_path",
    }
)


def check_toml(text: str) -> None:
    """Settings of Runnel; a key that is not known is refused as at the start of a broker."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runnel.toml")
        path.write_text(text, encoding="utf-8")
        load(config_path=str(path), environment={})


def check_yaml(text: str) -> None:
    loaded: Any = yaml.safe_load(text)
    assert isinstance(loaded, dict), "a file of settings is a map"
    for job in loaded.get("scrape_configs", ()):
        assert "job_name" in job
        assert set(job) <= _OF_SCRAPES, f"not of Prometheus: {set(job) - _OF_SCRAPES}"
    for group in loaded.get("groups", ()):
        for rule in group["rules"]:
            assert {"expr"} < set(rule), rule
            assert rule["expr"].count("(") == rule["expr"].count(")"), rule["expr"]
    for service in loaded.get("services", {}).values():
        if "runnel" in str(service.get("command", "")):
            _check_container_command(service["command"])


def check_unit(text: str) -> None:
    """A unit of systemd: sections, keys with values, and commands that exist."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys have capitals
    parser.read_string(text)
    assert set(parser.sections()) <= _SECTIONS, parser.sections()
    for section in parser.sections():
        for key, value in parser.items(section):
            assert re.fullmatch(r"[A-Z][A-Za-z]+", key), f"no key of systemd: {key}"
            if key.startswith("Exec"):
                _check_started(value.lstrip("-@:+!"))
    if (verify := shutil.which("systemd-analyze")) is not None:
        _verify_unit(verify, text, "timer" if "Timer" in parser.sections() else "service")


def _verify_unit(verify: str, text: str, kind: str) -> None:
    """By systemd itself, which also looks whether programs are there: this Python stands for them."""
    text = re.sub(r"(?m)^(Exec\w+=[-@:+!]*)\S+", rf"\g<1>{sys.executable}", text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"page.{kind}")
        path.write_text(text, encoding="utf-8")
        ended = subprocess.run(
            [verify, "verify", "--man=no", str(path)], capture_output=True, text=True, check=False
        )
    told = [line for line in ended.stderr.splitlines() if "page." in line and "nknown" in line]
    assert not told, told


def check_image(text: str) -> None:
    """A Containerfile: its instructions, and the commands of Runnel in them."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    assert lines
    assert lines[0].split()[0] in ("FROM", "ARG"), "an image begins with FROM"
    entry: list[str] = []
    for line in lines:
        instruction, _, rest = line.strip().partition(" ")
        assert _INSTRUCTION.fullmatch(instruction), (
            f"no instruction of a Containerfile: {instruction}"
        )
        if instruction in ("ENTRYPOINT", "CMD"):
            entry += json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        elif instruction in ("RUN", "HEALTHCHECK"):
            for words in runnel_commands(rest.removeprefix("CMD ")):
                check_command(words)
    if entry:
        _check_container_command(entry)


def check_proto(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "page.proto").write_text(text, encoding="utf-8")
        words = ["-m", "grpc_tools.protoc", f"-I{folder}", f"--descriptor_set_out={folder}/out"]
        subprocess.run([sys.executable, *words, f"{folder}/page.proto"], check=True)


def check_python(text: str) -> None:
    compile(text, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def check_javascript(text: str) -> None:
    """By Node.js where it is; a browser's names are not looked up by it."""
    if (node := shutil.which("node")) is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.mjs")
        path.write_text(text, encoding="utf-8")
        subprocess.run([node, "--check", str(path)], check=True)


def check_shell(text: str) -> None:
    """That every `runnel` command parses, and that every program of this repository is there."""
    for words in runnel_commands(text):
        check_command(words)
    for statement in statements(text):
        program = shlex.split(statement, comments=True)[0]
        assert not program.startswith("bin/") or (ROOT / program).exists(), f"no {program}"


def check_console(text: str) -> None:
    commands = (line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))
    check_shell("\n".join(commands))


CHECKS: Final[dict[str, Callable[[str], object]]] = {
    "console": check_console,
    "dockerfile": check_image,
    "ini": check_unit,
    "js": check_javascript,
    "json": json.loads,
    "proto": check_proto,
    "python": check_python,
    "sh": check_shell,
    "toml": check_toml,
    "yaml": check_yaml,
}


def check(block: Block) -> None:
    """By its language; one that is not known is a mistake."""
    if block.language not in CHECKS:
        known = ", ".join(sorted({*CHECKS, "text"}))
        raise PageError(f"{block}: nobody knows how to check this language; there are {known}")
    try:
        CHECKS[block.language](block.text)
    except Exception as error:
        raise AssertionError(f"{block}: {error}") from error


def check_tested_elsewhere(block: Block) -> None:
    """The named test exists. If the harness does not know the language, that test must name the page."""
    test = ROOT / block.notes[Word.TESTED_BY]
    assert test.is_file(), f"{block}: no test {test.relative_to(ROOT)}"
    if block.language in CHECKS:
        check(block)
    else:
        name = Path(block.page).name
        assert name in test.read_text(encoding="utf-8"), f"{block}: {test.name} is not about {name}"


def _check_started(line: str) -> None:
    words = shlex.split(line)
    assert words[0].startswith("/"), f"systemd wants a whole path: {words[0]}"
    if Path(words[0]).name == "runnel":
        check_command(words[1:])


def _check_container_command(command: str | list[str]) -> None:
    words = shlex.split(command) if isinstance(command, str) else command
    if "runnel" in words:
        check_command(words[words.index("runnel") + 1 :])
