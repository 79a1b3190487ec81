"""Runnel: a message broker that starts with one command and hands its data to Spark."""
