"""Real server processes: killed, ended, started again, out of room, and spoken to by those who mean no good."""
