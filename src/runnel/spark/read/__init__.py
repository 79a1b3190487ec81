"""Reading topics from Spark, in batches and streams."""
