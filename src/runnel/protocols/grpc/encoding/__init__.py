"""Messages, options and positions: from the .proto's form to the broker's, and back."""
