"""The broker: the verbs that every door offers, and what joins the logs to their readers.

`broker` is the face. `stores` finds the log of a topic, `live_topics` has those that no log keeps. `live_reading`
begins and feeds live subscriptions (`live_subscription`, `starting`, `feeds`), `fanout` sends what becomes visible;
`fetching` answers replayed reading, `gathering` makes batches of single messages. `metrics`, `reporter`, `events` and
`housekeeping` watch and tidy.
"""
