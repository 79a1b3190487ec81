"""Topics in a Delta table of Parquet files, each message once; and reading them back. Read `job.py` first.

layout        columns by version, where files lie, the properties of each
table         the table: opens it, brings it up to date, adds files, reports its content
row_groups    stored batches as tables, each enough for a row group
file_writer   writes these to Parquet files; tasks use it
file_sync     syncs files before the table names them
source        both ends of the streaming query: tasks that write files, a commit that adds them to the table
job           `archive`, from its options to its end
query_record  the record of each query that fills a table
compaction    joins many small files into few large ones; removes files that no version needs
reader        `read_archive`, alone or joined to the log
status        what a table has, and how far its queries are
"""

__all__ = ["compaction", "job", "reader", "status", "table"]
