"""Clients of the doors for which Runnel has none of its own, with the verbs of `Bus`, so that one suite fits all.

They are as plain as a client can be: no reconnecting, no renewing, and what the broker can refuse they let it refuse.
"""
