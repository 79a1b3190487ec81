"""Settings: frozen structs, merged once from defaults, file, environment and flags.

`settings` holds the structs, `layers` reads each source, `merger` joins them. Only `loader` reads files and variables.
"""

from runnel.config.layers import Flag, Origin, SettingSource
from runnel.config.loader import load
from runnel.config.merger import LoadedSettings, merge
from runnel.config.settings import (
    AUTO,
    IN_MEMORY,
    SHARDS_OF_SEVERAL,
    Authentication,
    BrokerSettings,
    ClusterSettings,
    GrpcSettings,
    HttpSettings,
    Keep,
    LimitSettings,
    LogLevel,
    LogSettings,
    NativeSettings,
    Pin,
    Retain,
    Rotate,
    SecuritySettings,
    Settings,
    TopicRule,
    Until,
)
from runnel.config.units import (
    format_duration,
    format_size,
    format_time_of_day,
    parse_duration,
    parse_size,
    parse_time_of_day,
)

__all__ = [
    "AUTO",
    "IN_MEMORY",
    "SHARDS_OF_SEVERAL",
    "Authentication",
    "BrokerSettings",
    "ClusterSettings",
    "Flag",
    "GrpcSettings",
    "HttpSettings",
    "Keep",
    "LimitSettings",
    "LoadedSettings",
    "LogLevel",
    "LogSettings",
    "NativeSettings",
    "Origin",
    "Pin",
    "Retain",
    "Rotate",
    "SecuritySettings",
    "SettingSource",
    "Settings",
    "TopicRule",
    "Until",
    "changes",
    "format_duration",
    "format_size",
    "format_time_of_day",
    "layers",
    "load",
    "merge",
    "parse_duration",
    "parse_size",
    "parse_time_of_day",
    "renderer",
    "settings",
    "units",
]
