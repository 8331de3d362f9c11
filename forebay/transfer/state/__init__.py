"""Tickets of transfers as data: the sent and received parts of each. No I/O."""
