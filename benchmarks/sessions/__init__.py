"""Conversations: what the second turn costs when the first one's keys and values are still there."""
