"""Requests and answers as text and bytes: messages as JSON, parameters, problems, server-sent events."""
