"""What drafting gets accepted: sources and trained drafters on held-out prompts (`make bench-acceptance`)."""
