"""Blocks between nodes: wire format, links, serving and pulling."""
