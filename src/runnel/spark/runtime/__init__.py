"""The Spark session and what it runs on: Java, Python workers, files. Read `session.py` first."""

__all__ = ["executor_package", "fault_text", "java", "session"]
