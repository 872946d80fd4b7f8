"""Stands in for vLLM where its process is started, not what it computes."""
