"""Topics as pure code: names, patterns, policies and partitions. Read `names.py` first.

names          which names a topic, cursor, producer, subscription or journal may have
patterns       globs over topic names
pattern_index  which subscribers match a topic, and which topics match a pattern, for many of both
registrations  the patterns of subscribers, by their literal beginning
answers        caches the subscribers of each topic
sorted_names   names in order, for finding those that share a beginning
policies       the rules of the settings, and the policy that they give a topic
partitions     the partition that a message goes to
read_position  where a reader resumes
covering       whether one pattern covers another
hints          wildcards and option words of other brokers, for "did you mean"
"""

__all__ = [
    "covering",
    "hints",
    "names",
    "partitions",
    "pattern_index",
    "patterns",
    "policies",
    "read_position",
]
