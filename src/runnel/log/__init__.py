"""Stored messages. Read `log` first, then `disk_log`, `shard`, `writer`, `reader`.

log              the interface and its values
disk_log         all shards of a data directory     memory_log       the twin that forgets
removing         topics purged and deleted          folders          made when first needed
shard            one shard on disk                  memory_shard     one in memory
writer           numbering, queue, group commit     memory_batches   what it is made of
group_writer     the part of it that blocks         pending          a batch on its way
reader           places from the index, bytes from the file
trimmer          retention at work                  retention        what may go, as a pure decision
acked            what acknowledging lets go         pins             what readers claim of a shard
rewriting        a segment without some messages
last_values      what is kept beyond retention      last_value_keeper  how it comes to be
segment          one file of blocks                 segments         the files of a shard
index            where each run lies                scan             what is whole after a crash
catalogue        what outlives segments             catalogue_state  what its records add up to
state_journal    what subscriptions have done       definitions      what they are
record_journal   a file of records, snapshotted     recovery         a directory as it is found
records          small checksummed records
topic_table      topics and numbers in memory       producers        sequences of named publishers
cursors          named positions that pin           files            a bounded number of open files
paths            the layout of a data directory     tasks            tasks with an owner
reading          the same files, read only and offline
"""
