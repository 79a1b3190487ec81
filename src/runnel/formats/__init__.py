"""Every byte layout of Runnel, as pure functions of bytes: docs/protocol.md draws them.

message      what a reader holds, one row
table        columns as they are held in memory
building     columns made from values
columns      the body: columns in Arrow's buffer layout, read and written
envelope     what the broker reads and fills in: runs, position, producer, checksum
block        envelope and body as they lie in a file and travel in a frame
compression  bodies in lz4 and zstd
batch        the table a user holds; joins the layers above
selection    rows taken out of batches, and batches joined
arrow        a batch as a pyarrow.RecordBatch (the only module that needs pyarrow)
frames       length-prefixed frames of the native protocol
ksuid        the form of a message's uid
"""
