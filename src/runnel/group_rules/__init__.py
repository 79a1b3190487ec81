"""Acknowledged work as pure code: what is owed, to whom it is leased, what failed, what is done.

definition      what a subscription is: its name, topics, mode and options
effects         what the rules hand out: deliveries, wants, and what the broker has to do
masks           sets of neighbouring offsets as the bits of one integer
offset_set      offsets in order, for finding the lowest of them
ack_set         which offsets of a partition are done
records         what a state journal holds of all this, and what its records add up to
windows         how much each consumer may have at once, and whose turn it is
leases          what is leased to whom, and until when
selection       what a consumer names of what it has
group state            what the partitions of a group share
partition_work  what a partition owes: shared work, to whomever has room
queues           the messages of one key that are on their way
lane_table      the queues of a partition, and what of them is shown to be wanted
delivery builders         what one offer gives to whom
keyed_work      what a partition owes in key_shared mode: a key to one consumer at a time, in order
group           consumers that share what is owed: the face of it all
"""
