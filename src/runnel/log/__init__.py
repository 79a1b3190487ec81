"""Stored messages. Read `log` first, then `disk_log`, `shard`, `segment`.

log          the interface and its values          memory_log   the twin that forgets
disk_log     all shards of a data directory        shard        one shard: its segments and their lives
writer       queue and group commit                reader       places from the index, bytes from the file
segment      one file of blocks                    index        where each run lies in it
segments     the files of one shard                scan         finding what is whole after a crash
rewriting    a segment without some messages       retention    what may go, as a pure decision
producers    sequences of named publishers         topic_table  topics and partitions in memory
cursors      named positions that hold messages    last_values  last messages kept beyond retention
catalogue    what outlives segments                records      small checksummed records in a file
files        a bounded number of open files        paths        the layout of a data directory
reading      the same files, read only, offline    tasks        tasks with an owner
memory_shard one shard in memory                   memory_batches  what it is made of
"""
