"""The draft model: its configuration and network, the two files that travel with every saved draft."""
