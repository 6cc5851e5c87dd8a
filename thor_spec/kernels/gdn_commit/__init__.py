"""Move accepted tokens from the record into the recurrent state, now or later."""
