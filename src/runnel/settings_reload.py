"""Reloads settings while the broker runs: applies those that can change, and logs those that need a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from runnel.broker.broker import Broker
from runnel.config import LogLevel, Settings
from runnel.config.changes import changes_between, taken_over
from runnel.errors import SettingsError
from runnel.platform.diagnostics import get_logger
from runnel.security.authenticator import Authenticator
from runnel.topics.policies import Policies

logger = get_logger("runnel")

# Lines of each kind for one reload: a file of a thousand rules must not fill the diagnostics.
_LINES_MAX: Final = 100


class SettingsReload:
    """Reads the settings again and applies them; the log level too."""

    def __init__(
        self,
        load: Callable[[], Settings],
        set_log_level: Callable[[LogLevel], None],
    ) -> None:
        self._load = load
        self._set_log_level = set_log_level

    async def reload(
        self, running: Settings, broker: Broker, authenticator: Authenticator
    ) -> Settings:
        """Apply what can change; returns the settings in effect. If the file is wrong, nothing changes."""
        try:
            # In a thread: a slow file system must not block the loop.
            wanted = await asyncio.to_thread(self._load)
            policies = Policies(wanted.topics, partitions_max=running.limits.partitions_max)
        except SettingsError as error:
            logger.error(  # noqa: TRY400 - a wrong file, not a bug
                "the settings were not reloaded, everything stays as it was", problem=str(error)
            )
            return running
        changes = changes_between(running, wanted)
        in_effect = taken_over(running, wanted)
        authenticator.use(in_effect.security)
        broker.quotas.use(in_effect.security)
        differences = await broker.follow_rules(policies)
        await broker.warn_of_habits("[[topics]]", (rule.match for rule in in_effect.topics))
        # The lines below are shown if the old or the new level shows them.
        levels = (running.log_level, in_effect.log_level)
        self._set_log_level(min(levels, key=list(LogLevel).index))
        applied = [change for change in changes if change.is_reloadable]
        need_restart = [change for change in changes if not change.is_reloadable]
        for change in applied[:_LINES_MAX]:
            logger.info("setting changed", key=change.key, old=change.old, new=change.new)
        for change in need_restart[:_LINES_MAX]:
            logger.warning(
                "setting needs a restart", key=change.key, running=change.old, file=change.new
            )
        for difference in differences[:_LINES_MAX]:
            logger.warning(
                "a topic stays as it was made", topic=difference.topic, text=difference.text
            )
        logger.info(
            "settings reloaded",
            changed=len(applied),
            need_restart=len(need_restart),
            topics_differ=len(differences),
        )
        self._set_log_level(in_effect.log_level)
        return in_effect
