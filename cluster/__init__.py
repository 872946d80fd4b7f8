"""The fleet: node daemon, engine connector, worker supervision, Ray, settings, command line."""
