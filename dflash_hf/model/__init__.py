"""The configuration and the network of the draft model, in the two files that travel with every saved draft."""
