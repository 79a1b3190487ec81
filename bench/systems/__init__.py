"""The brokers that are compared: for each, how its server is started and the roles its Python client plays."""
