"""Model cards of drafts, and pushes to the Hub."""
