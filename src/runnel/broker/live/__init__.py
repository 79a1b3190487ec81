"""Live reading: subscriptions by topic pattern, what they are sent, and topics that no log keeps."""
