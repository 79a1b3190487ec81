"""One folder for each protocol: it turns bytes into the broker's verbs, and answers into bytes."""
