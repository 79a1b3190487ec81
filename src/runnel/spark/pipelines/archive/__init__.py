"""Topics in a Delta table of Parquet files, each message once; and reading them back.

layout        columns by version, where files lie, what is told of each
table         the table: opened, brought up to date, added to, asked what it has
row_groups    stored batches as tables, each enough for a row group
file_writer   these into Parquet files; what tasks do
syncing       files on the disk before anybody is told of them
source        the streaming query's two ends: tasks that write files, a commit that adds them to the table
running       `archive`, from its options to its end
query_record  what is written down of each query that fills a table
compaction    few large files in the place of many small ones; files that nobody needs are removed
reading       `read_archive`, alone or joined to the log
status        what a table has and how far its queries are

Tasks on executors need no Delta library: only `table` and what stands upon it imports it.
"""
