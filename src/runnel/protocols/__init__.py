"""Doors: one folder per protocol, in which bytes become the broker's verbs and its answers become bytes."""
