"""The Spark session and what it runs on: Java, Python workers, files."""
