"""The router: admits, queues, places and streams requests, and recovers them. No torch."""
