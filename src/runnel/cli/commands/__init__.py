"""The commands of `runnel`: one module per command or group, each with an `app`. `main.py` imports them by name."""
