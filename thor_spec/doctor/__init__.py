"""What this machine and this environment can do, line by line, each with a remedy."""
