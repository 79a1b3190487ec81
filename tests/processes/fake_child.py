"""A program in the place of a broker's child. What it does is drawn from the file that its first word names.

The file has a line for each thing that this child does next: `serve`, `crash`, `refuse`, `hang`, `vanish`, `stubborn`.
The line is taken out of the file when it begins. Without a line it serves. It writes what it hears to standard error.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from socket import socket

from runnel.errors import SettingsError
from runnel.processes.channel import receive_blocking
from runnel.processes.messages import (
    EndWord,
    Heartbeat,
    Joined,
    Launch,
    NewSettings,
    Reloaded,
    Serving,
    StartFailure,
    decode_to_child,
    encode,
)

HEARTBEAT_SECONDS = 0.1


def next_deed(path: Path, node: str) -> str:
    """Take the next line of this node out of the file."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        mine = [line for line in lines if line.startswith(f"{node} ")]
        if not mine:
            return "serve"
        lines.remove(mine[0])
        file.seek(0)
        file.truncate()
        file.write("".join(f"{line}\n" for line in lines))
    return mine[0].split()[1]


def main() -> int:
    path, node, descriptor = sys.argv[1:]
    end = socket(fileno=int(descriptor))
    content = receive_blocking(end)
    assert content is not None
    launch = decode_to_child(content)
    assert isinstance(launch, Launch)

    def say(text: str) -> None:
        os.write(2, f"{node} {os.getpid()} {text}\n".encode())

    assert launch.settings.cluster.node == node
    listening = socket(fileno=launch.sockets["native"])
    manager = os.environ.get("NOTIFY_SOCKET")
    say(f"launched life={launch.life} former={launch.former_end!r} manager={manager}")
    deed = next_deed(Path(path), node)
    end.sendall(encode(Heartbeat()))
    end.sendall(encode(Joined(launch.life, f":{launch.number}")))
    match deed:
        case "vanish":
            return 0
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "refuse":
            end.sendall(encode(StartFailure(SettingsError.code, "tls_key: no such file")))
            return 1
    end.sendall(encode(Serving([])))
    if deed == "hang":
        signal.pause()
    while True:
        ready, _, _ = select.select([end], [], [], HEARTBEAT_SECONDS)
        if not ready:
            with suppress(BrokenPipeError):  # then it reads the end
                end.sendall(encode(Heartbeat()))
            continue
        content = receive_blocking(end)
        if content is None:
            say("orphaned")
            return 0
        match decode_to_child(content):
            case NewSettings(settings):
                say(f"settings level={settings.log_level} node={settings.cluster.node}")
                end.sendall(encode(Reloaded()))
            case EndWord(is_hurried):
                say(f"end hurried={is_hurried} listens={listening.getsockname()[1]}")
                if deed != "stubborn" or is_hurried:
                    return 0


if __name__ == "__main__":
    sys.exit(main())
