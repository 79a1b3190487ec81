"""How the commands print: tables, messages, times. `tables.py` has the words and tables that all of them use."""
