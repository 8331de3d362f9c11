"""One endpoint in front of prefill and decode servers: who gets which half of a request, and their processes."""
