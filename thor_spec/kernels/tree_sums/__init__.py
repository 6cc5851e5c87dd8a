"""What a batch expects of its drafts and got of the last ones, as one row of sums for the host."""
