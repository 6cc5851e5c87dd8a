"""What others ran into: lines of logs with their remedies, and combinations that do not work. Data, with sources."""
