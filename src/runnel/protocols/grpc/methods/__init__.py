"""The methods of the service, by subject."""
