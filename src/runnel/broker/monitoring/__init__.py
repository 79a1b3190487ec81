"""What operators see of a broker: metrics, events, audit trail."""
