"""One endpoint in front of prefill and decode servers: the choice of servers for a request, and their processes."""
