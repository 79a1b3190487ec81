"""How the commands print: tables, messages, times. `tables.py` has the words and tables that all of them use."""

__all__ = [
    "banner",
    "cluster_tables",
    "copies",
    "dead_letters",
    "inspection",
    "message_output",
    "messages",
    "node_reports",
    "subscription_tables",
    "tables",
    "times",
    "top_view",
]
