"""Make or refresh .venv: one environment, filled set by set from the pins in requirements/.

Runs on a bare Python 3.11+, so it imports nothing but the standard library. A set is a lock file;
sets come from one resolution, so adding one never changes another. What a finished set was made
from is recorded in `.venv/runnel-<set>.json`, and a set whose record still fits is left alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
REQUIREMENTS = ROOT / "requirements"

# Present while packages are being written: an environment that has it was left half-made.
UNFINISHED = VENV / "runnel-unfinished"

# Sets that some Pythons and platforms have no wheels for. What needs them says so when it runs.
OPTIONAL_SETS = frozenset({"fuzz"})

# pip's settings, by the names under which uv knows them, so that a private index serves both.
UV_NAMES = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_CERT": "SSL_CERT_FILE",
}

Command: TypeAlias = list[str | Path]

REMINDER_SECONDS = 15.0
TICK_SECONDS = 0.1


class SetupError(Exception):
    """The environment cannot be made; the text says what to do about it."""


# --- What is installed ---


def site_packages() -> Path:
    """Where packages of .venv live, for the Python that it was made with."""
    found = sorted((VENV / "lib").glob("python3*/site-packages"))
    return found[-1] if found else VENV / "lib"


def lock_of(set_name: str) -> Path:
    return REQUIREMENTS / f"{set_name}.lock"


def fingerprint(set_name: str) -> str:
    """What a set is made from: its pins, the project's own description, and where it all stands.

    The place counts because scripts in .venv/bin name their interpreter by its full path.
    """
    digest = hashlib.sha256()
    for part in (
        lock_of(set_name).read_bytes(),
        (ROOT / "pyproject.toml").read_bytes(),
        str(ROOT).encode(),
        (VENV / "pyvenv.cfg").read_bytes(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def installed() -> set[str]:
    return {name for name in os.listdir(site_packages()) if name.endswith(".dist-info")}


def is_current(set_name: str) -> bool:
    """Whether the set was installed completely from the current files, and nothing of it was removed since."""
    try:
        record = json.loads((VENV / f"runnel-{set_name}.json").read_bytes())
        return (
            not UNFINISHED.exists()
            and record["fingerprint"] == fingerprint(set_name)
            and installed().issuperset(record["installed"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def flaw() -> str | None:
    """Why .venv has to be made anew, or None when it can be kept."""
    if not (VENV / "pyvenv.cfg").is_file():
        return "it is not a virtual environment"
    if UNFINISHED.exists():
        return "it was left half-made"
    if not any(VENV.glob("runnel-*.json")):
        return "nothing in it was finished"
    if (wanted := os.environ.get("PYTHON")) and version_of(VENV_PYTHON) != version_of(wanted):
        return f"PYTHON={wanted} is another version"
    probe = "import sys; print(sys.prefix); sys.exit(sys.version_info < (3, 11))"
    try:
        answer = subprocess.run(
            [VENV_PYTHON, "-I", "-c", probe], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"its Python does not start ({error.strerror})"
    if answer.returncode != 0:
        return "its Python does not run, or is older than 3.11"
    if Path(answer.stdout.strip()).resolve() != VENV.resolve():
        return "it was made in another place"
    scripts = VENV / "bin" / "pytest"
    if scripts.is_file() and str(VENV) not in scripts.read_text(errors="replace")[:1000]:
        return "it was made in another place"
    return None


def version_of(python: str | Path) -> str | None:
    """The interpreter's version, or None if it does not run."""
    try:
        answer = subprocess.run(
            [python, "-I", "-c", "import platform; print(platform.python_version())"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return answer.stdout.strip() or None


# --- Progress ---


class SetupProgress:
    """One line a step with the time it took, on stderr; a running clock if that is a terminal."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def say(self, text: str) -> None:
        print(f"[setup] {text}", file=sys.stderr, flush=True)

    def run(self, step: str, command: Command, env: Mapping[str, str]) -> str | None:
        """Run a command. Returns None when it succeeded, otherwise its output."""
        if not self._live:
            self.say(f"{step} ...")
        begun = reminded = time.monotonic()
        output: str | None = None
        process = subprocess.Popen(
            command,
            env=env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            while output is None:
                try:
                    output, _ = process.communicate(timeout=TICK_SECONDS)
                except subprocess.TimeoutExpired:
                    now = time.monotonic()
                    if self._live:
                        print(f"\r[setup] {step} ... {now - begun:.1f} s", end="", file=sys.stderr)
                    elif now - reminded >= REMINDER_SECONDS:
                        reminded = now
                        self.say(f"{step}: still at it after {now - begun:.0f} s")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        verdict = "done" if process.returncode == 0 else "failed"
        start = "\r" if self._live else ""
        print(
            f"{start}[setup] {step}: {verdict} in {time.monotonic() - begun:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        return None if process.returncode == 0 else output.strip()


# --- Installing ---


class Installer:
    """Makes the environment and puts packages into it: with uv if it can be had, else with pip."""

    def __init__(self, progress: SetupProgress) -> None:
        self._progress = progress
        # From inside some other environment, its base is meant: that one may vanish.
        self._base = Path(getattr(sys, "_base_executable", None) or sys.executable)
        self._uv = self._usable_uv(shutil.which("uv"))
        self._fetched_uv = False

    def make(self) -> None:
        version = version_of(self._base)
        step = f"making .venv with Python {version}"
        UNFINISHED.parent.mkdir(exist_ok=True)
        UNFINISHED.touch()
        if self._uv is not None:
            command: Command = [self._uv, "venv", "--allow-existing", "--python", self._base, VENV]
            problem = self._progress.run(step, command, self._uv_environment())
            if problem is None:
                return
            self._progress.say("uv could not make it; trying Python's own venv")
        # Without ensurepip (some distributions take it out) an outer pip can still fill it.
        bare = [] if self._runs(self._base, "ensurepip") else ["--without-pip"]
        command = [self._base, "-I", "-m", "venv", "--symlinks", *bare, VENV]
        problem = self._progress.run(step, command, os.environ)
        if problem is not None:
            raise SetupError(f"{problem}\n\n{self._base} cannot make a virtual environment.")

    def install(self, set_name: str) -> None:
        UNFINISHED.touch()
        requirements: Command = ["--require-hashes", "-r", lock_of(set_name)]
        if set_name in OPTIONAL_SETS:
            requirements += ["--only-binary", ":all:"]
        problem = self._install(f"installing requirements/{set_name}.lock", requirements)
        if problem is not None and set_name in OPTIONAL_SETS:
            self._progress.say(
                f"going on without it: requirements/{set_name}.lock does not fit here"
            )
        elif problem is not None:
            raise SetupError(problem)
        if set_name not in OPTIONAL_SETS:
            editable: Command = ["--no-deps", "--no-build-isolation", "--editable", ROOT]
            problem = self._install("installing runnel itself, editable", editable)
            if problem is not None:
                raise SetupError(problem)
        record = {"fingerprint": fingerprint(set_name), "installed": sorted(self._names(set_name))}
        (VENV / f"runnel-{set_name}.json").write_text(json.dumps(record, indent=1))
        UNFINISHED.unlink()

    def _install(self, step: str, arguments: Command) -> str | None:
        """Install with uv, or else with pip, which may know of an index that uv does not."""
        if self._uv is None and not self._fetched_uv:
            self._fetch_uv()
        uv_problem = None
        if self._uv is not None:
            command: Command = [self._uv, "pip", "install", "--python", VENV_PYTHON, *arguments]
            uv_problem = self._progress.run(f"{step} (uv)", command, self._uv_environment())
            if uv_problem is None:
                return None
        pip = self._pip()
        if pip is None:
            return uv_problem or (
                f"{self._base} has neither ensurepip nor pip, and there is no uv. Install one of "
                "them (on Debian and Ubuntu: apt install python3-venv) and try again."
            )
        command = [*pip, "install", "--disable-pip-version-check", "--no-input", *arguments]
        pip_problem = self._progress.run(f"{step} (pip)", command, os.environ)
        if pip_problem is None:
            return None
        return "\n\n".join(said for said in (uv_problem, pip_problem) if said)

    def _fetch_uv(self) -> None:
        self._fetched_uv = True  # once, whatever comes of it
        pip = self._pip()
        if pip is None:
            return
        command: Command = [*pip, "install", "--disable-pip-version-check", "--no-input"]
        command += ["--retries", "1", "--only-binary", ":all:"]
        command += ["--require-hashes", "-r", lock_of("installer")]
        self._progress.run("fetching uv, which installs faster", command, os.environ)
        self._uv = self._usable_uv(str(VENV / "bin" / "uv"))

    def _pip(self) -> Command | None:
        """A pip that installs into .venv: its own, else the base interpreter's."""
        if self._runs(VENV_PYTHON, "pip"):
            return [VENV_PYTHON, "-I", "-m", "pip"]
        if self._runs(VENV_PYTHON, "ensurepip"):
            step = "adding pip to .venv"
            command: Command = [VENV_PYTHON, "-I", "-m", "ensurepip"]
            if self._progress.run(step, command, os.environ) is None:
                return [VENV_PYTHON, "-I", "-m", "pip"]
        if self._runs(self._base, "pip"):
            return [self._base, "-I", "-m", "pip", "--python", VENV_PYTHON]
        return None

    def _names(self, set_name: str) -> set[str]:
        """The directories in site-packages that show that the set is still installed."""
        wanted = {
            line.split("==")[0].replace("-", "_").replace(".", "_").lower()
            for line in lock_of(set_name).read_text().splitlines()
            if "==" in line and not line.startswith((" ", "#"))
        }
        return {
            name
            for name in installed()
            if name.partition("-")[0].replace(".", "_").lower() in wanted
            or (name.startswith("runnel-") and set_name not in OPTIONAL_SETS)
        }

    @staticmethod
    def _runs(python: Path, module: str) -> bool:
        probe: Command = [python, "-I", "-c", f"import {module}"]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    @staticmethod
    def _usable_uv(path: str | None) -> Path | None:
        """The path of uv if it runs: a version manager may have a stand-in for a uv that is missing."""
        if path is None or not Path(path).exists():
            return None
        answer = subprocess.run([path, "--version"], capture_output=True, check=False)
        return Path(path) if answer.returncode == 0 else None

    @staticmethod
    def _uv_environment() -> dict[str, str]:
        environment = dict(os.environ)
        for pip_name, uv_name in UV_NAMES.items():
            if pip_name in environment and uv_name not in environment:
                environment[uv_name] = environment[pip_name]
        if "UV_FIND_LINKS" not in os.environ and "UV_FIND_LINKS" in environment:
            environment["UV_FIND_LINKS"] = ",".join(environment["UV_FIND_LINKS"].split())
        # Trust the machine's certificates, as pip does: a company's own are among them.
        environment.setdefault("UV_SYSTEM_CERTS", "true")
        # Use .venv, whichever environment is active.
        environment.pop("VIRTUAL_ENV", None)
        return environment


@contextmanager
def only_one(progress: SetupProgress) -> Iterator[None]:
    """Hold the setup lock. It ends with the process, so a killed setup leaves nothing to clear."""
    with open(ROOT / ".venv.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("waiting for another setup of this .venv ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def set_up(set_names: list[str]) -> None:
    """Bring every named set up to date, in the order given."""
    progress = SetupProgress()
    with only_one(progress):
        reason = flaw() if VENV.exists() or VENV.is_symlink() else "there is none yet"
        outdated = [name for name in set_names if reason or not is_current(name)]
        if not outdated:
            return
        begun = time.monotonic()
        installer = Installer(progress)
        if reason is not None:
            if VENV.is_symlink() or VENV.is_file():
                VENV.unlink()
            elif VENV.exists():
                progress.say(f"remaking .venv: {reason}")
                shutil.rmtree(VENV)
            installer.make()
        try:
            for name in outdated:
                installer.install(name)
        except SetupError:
            # The installers undo what they cannot finish, so the former packages still work.
            UNFINISHED.unlink()
            raise
        progress.say(f"ready after {time.monotonic() - begun:.1f} s")


def main(arguments: list[str]) -> int:
    """`environment.py [--check] SET...`: exit code 0 when every set is (made) current."""
    check_only = "--check" in arguments
    set_names = [argument for argument in arguments if argument != "--check"]
    unknown = [name for name in set_names if not lock_of(name).is_file()]
    if unknown or not set_names:
        known = ", ".join(sorted(path.stem for path in REQUIREMENTS.glob("*.lock")))
        print(f"usage: environment.py [--check] SET...   with SET of {known}", file=sys.stderr)
        return 2
    if check_only:
        return 0 if all(is_current(name) for name in set_names) else 1
    try:
        set_up(set_names)
    except SetupError as error:
        print(f"{error}\n\n[setup] .venv could not be made ready.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n[setup] interrupted; the next run makes .venv anew.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
