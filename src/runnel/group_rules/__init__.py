"""The rules of acknowledged work, as pure code: events and the time go in, effects come out. Read `group.py` first.

group             the consumers and partitions of one consumer group: every event comes here
definition        what a subscription is: its name, topics, mode and options
effects           what the rules return: deliveries, offsets to read, records to store
shared_partition  what a partition owes in `shared` and `multicast` mode
keyed_partition   what a partition owes in `key_shared` mode, with a queue for each key
key_queues, key_queue    the messages of each key, in order
leases, windows   what is leased to which consumer and until when; how much each consumer may hold
lease_selection   which messages of a delivery an ack or nack names
delivery_builders collects messages for a consumer into deliveries
awaited_holders   whom the new owner of a partition waits for, and what they had at the former one
group_state       what the partitions of a group share
records           what a state journal stores, and what its records add up to
ack_set, offset_set, masks    sets of offsets: acknowledged ones, ordered ones, neighbours as the bits of an integer
"""

__all__ = ["ack_set", "awaited_holders", "definition", "effects", "group", "masks", "records"]
