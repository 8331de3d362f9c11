"""Caches on their way from one engine (prefill) to another (decode): control channel, tickets and transports."""
