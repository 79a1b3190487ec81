"""Who may come in, and what they may do: rights by topic pattern, tokens kept as hashes, and the gate of all doors."""
