"""The kernel of the four simulators: log, broker, consumer groups, and the pure rules of consumer groups.

A simulator draws everything from one seed: settings, operations, timing and troubles. It runs the real code on a
simulated clock and disk, and compares what the code does with a model. `run_history(seed)` of each simulator raises
`HistoryFailed` with the broken promise, the transcript, and the command that replays it.

history     runs one history, reports its failure            seeds      fixed seeds, and the seeds of the day
process     a history of asynchronous code and its disk      mutants    deliberate mistakes that histories must find
troubles    what may go wrong; disk faults and power loss    operations what a history does, by weight

What stays in each simulator: its plan, its operations, its model and its mutants.
"""
