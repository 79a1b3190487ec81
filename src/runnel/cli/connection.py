"""The option --url, and an event loop with a connection to the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from runnel.cli.render.messages import escaped
from runnel.config.layers import URL_VARIABLE

if TYPE_CHECKING:
    from runnel.client import Bus

DEFAULT_URL: Final = "runnel://127.0.0.1:7470"

Url = Annotated[
    str,
    typer.Option(metavar="URL", envvar=URL_VARIABLE, help="URL of the broker."),
]

_Result = TypeVar("_Result")


def run_connected(
    url: str, work: Callable[[Bus], Awaitable[_Result]], *, tells_losses: bool = False
) -> _Result:
    """Connect, do the work, disconnect. With `tells_losses`, print lost and regained connections on standard error."""
    return run_loop(_connected(url, work, tells_losses=tells_losses))


def run_loop(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `main` in an event loop: uvloop's if it is installed. Ctrl-C cancels `main` and is raised here.

    If several tasks failed, this raises the first failure: the others mostly follow from it.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(main)
        except BaseExceptionGroup as group:
            raise _first_of(group) from group


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


async def _connected(
    url: str, work: Callable[[Bus], Awaitable[_Result]], *, tells_losses: bool
) -> _Result:
    from runnel.client import connect

    async with connect(url) as bus:  # the error of `connect` says what to do when no broker answers
        if tells_losses:
            bus.watch_connection(_tell_connection)
        return await work(bus)


def _tell_connection(is_connected: bool, state: str) -> None:  # noqa: FBT001 - a callback of the client
    line = f"back: {state} again" if is_connected else f"gone: {state}; trying again"
    typer.echo(escaped(line), err=True)
