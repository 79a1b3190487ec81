"""Topics as pure code: what they may be called, who wants them, how they are kept and split.

names          what a topic, cursor, producer, subscription or journal may be called
patterns       globs over topic names
pattern_index  who matches this topic, and which topics match this pattern, for many of both
registrations  the patterns of its subscribers, by what they begin with
answers        what it remembers of earlier lookups
sorted_names   names in order, for finding those that share a beginning
policies       the rules of the settings, and the policy they give a topic
partitions     which partition of its topic a message goes to
"""
