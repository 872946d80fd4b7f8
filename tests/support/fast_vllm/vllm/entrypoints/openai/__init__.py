"""Stands in for vLLM where its process is started: keeps the connector's contract."""
