"""What outlives segments: topics, offsets, cursors, subscriptions, producers, last values."""
