"""See `kv_cache_connector`."""
