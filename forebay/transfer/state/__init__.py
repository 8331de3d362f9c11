"""Tickets of transfers as data: what has been sent and received of each. No I/O."""
