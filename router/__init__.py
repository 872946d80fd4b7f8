"""The cache-aware OpenAI router. Meets the cluster in Redis and over HTTP only."""
